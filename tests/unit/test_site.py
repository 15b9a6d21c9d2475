"""The documentation site: pictures are those that the command draws now, the reference names all that is public, and the
planner page is a part of it."""

import functools
import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from measure.report.chromium import Page, needs_chromium, page

import shardwise
from shardwise.base.files.keys import reference
from shardwise.doors.cli.app import app
from shardwise.training.config.config import SECTIONS

ROOT = Path(__file__).parents[2]
REFERENCE = {"reference/python.md", "reference/command-line.md", "reference/config.md"}
GENERATED = {"index.md", "contributing.md", "changes.md", *REFERENCE}
MODULES = ("pictures", "line_chart", "fp8_picture", "frontier_picture", "reference")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name)


def test_pictures_are_those_that_the_command_draws(site: dict[str, ModuleType]) -> None:
    for name, draw in site["pictures"].PICTURES.items():
        drawn = (ROOT / "docs" / "images" / name).read_text()
        assert drawn == draw(), f"docs/images/{name} is old: run `python scripts/site/pictures.py`"


def test_the_picture_of_losses_in_fp8_is_the_one_that_the_command_draws(site: dict[str, ModuleType]) -> None:
    drawn = (ROOT / "docs" / "images" / "fp8-losses.svg").read_text()
    assert drawn == site["fp8_picture"].picture(), "it is old: run `python scripts/site/fp8_picture.py`"


@pytest.mark.whole
def test_the_picture_of_the_frontier_is_the_one_that_the_command_draws(site: dict[str, ModuleType]) -> None:
    module = site["frontier_picture"]
    drawn = (ROOT / "docs" / "images" / "frontier.svg").read_text()
    assert drawn == module.picture(module.points()), "it is old: run `python scripts/site/frontier_picture.py`"


def test_the_reference_has_every_public_name_with_its_text(site: dict[str, ModuleType]) -> None:
    page = site["reference"].python_page()
    for name in shardwise.__all__:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert len(section.split()) > 3, f"{name}: {section}"
    assert "0x" not in page


def test_the_reference_has_every_option_of_every_command(site: dict[str, ModuleType]) -> None:
    page = site["reference"].command_line_page()
    for name, command in typer.main.get_command(app).commands.items():
        section = page.partition(f"\n## shardwise {name}\n")[2]
        for option in (option for one in command.params for option in one.opts if option.startswith("--")):
            assert f"`{option}`" in section, f"shardwise {name} {option}"


def test_the_reference_has_every_key_of_a_config(site: dict[str, ModuleType]) -> None:
    page = site["reference"].config_page()
    for name, section in SECTIONS.items():
        rows = page.partition(f"\n## [{name}]\n")[2].partition("\n## ")[0]
        for key, default, _ in reference(section):
            assert f"| `{key}` | {default} |" in rows, f"[{name}] {key}"


def test_names_with_their_meaning_become_a_table(site: dict[str, ModuleType]) -> None:
    text = "What it is.\n\nfirst    one thing\n         and more of it\nsecond   another | thing\n\nThe end."
    lines = list(site["reference"].docstring(text))
    assert lines == [
        *("What it is.", "", "| | |", "|---|---|"),
        *("| `first` | one thing and more of it |", "| `second` | another \\| thing |", "", "The end.", ""),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, A link that leads nowhere would be an error."""
    load_config = pytest.importorskip("mkdocs.config").load_config
    build = pytest.importorskip("mkdocs.commands.build").build
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts" / "site"))
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder / "site"), strict=True))
        for name in MODULES:
            sys.modules.pop(name, None)
    return folder / "site"


FIRST = {
    "LoRA": "fine-tune.html",
    "cost": "rent.html",
    "resume": "checkpoints.html",
    "OOM": "when-it-goes-wrong.html",
    "hang": "when-it-goes-wrong.html",
    "checkpoint": "checkpoints.html",
    "gradient checkpointing": "gradient-checkpointing.html",
    "multi-node": "several-nodes.html",
    "wandb": "wandb.html",
    "streaming": "streaming.html",
    "packing": "packing.html",
    "multimodal": "multimodal.html",
    "RLHF": "generation.html",
    "slow first step": "slow-first-step.html",
    "fragmentation": "fragmentation.html",
}


@needs_chromium
@pytest.mark.timeout(300)
def test_a_search_finds_the_page_that_answers_first(built: Path) -> None:
    """The site's own search, in a browser."""
    first, *others = FIRST
    with served(built) as address, page(f"{address}/index.html?q={first}", width=1280) as opened:
        found = {first: first_result(opened)}
        for words in others:
            # In the same page, which has its index already; what it shows now must not be taken for the answer.
            opened.evaluate(f"({TYPE})({json.dumps(words)})")
            found[words] = first_result(opened)
    assert found == FIRST


TYPE = """
(words) => {
  document.querySelector(".md-search-result__list").replaceChildren();
  const field = document.querySelector(".md-search__input");
  field.value = words;
  field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
}
"""


def first_result(opened: Page) -> str:
    """The page of the first result that the open search shows."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        link = opened.evaluate("document.querySelector('.md-search-result__link')?.getAttribute('href') ?? ''")
        if link:
            return str(link).partition("#")[0].partition("?")[0].rpartition("/")[2]
        time.sleep(0.1)
    return ""


@needs_chromium
def test_a_page_that_was_opened_from_a_file_says_how_to_serve_the_site(built: Path) -> None:
    for width in (1280, 390):
        with page(built / "faq.html", width=width) as opened:
            note = opened.evaluate("document.querySelector('.from-file').innerText")
            height = opened.evaluate("document.querySelector('.from-file').getBoundingClientRect().height")
        assert note == "Search needs a server: make docs-serve"
        assert height > 0, "it is seen"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


def test_pages_outside_of_measurements_have_at_most_30000_words() -> None:
    (measurements,) = [part["Measurements"] for part in navigation() if "Measurements" in part]
    others = {page.name for page in (ROOT / "docs").glob("*.md")} - set(_pages(measurements))
    assert sum(len((ROOT / "docs" / name).read_text().split()) for name in others) <= 30_000


def navigation() -> list[dict[str, object]]:
    class Loader(yaml.SafeLoader):
        """Without Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav: list[dict[str, object]] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Loader)["nav"]
    return nav


def test_every_page_is_in_the_navigation() -> None:
    assert set(_pages(navigation())) == GENERATED | {page.name for page in (ROOT / "docs").glob("*.md")}


def _pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for part in nav:
            yield from _pages(part)
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from _pages(part)
