"""The documentation site: pictures are those that the command draws now, and the reference names all that is public."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

import shardwise
from shardwise.cli.app import app

ROOT = Path(__file__).parents[2]
GENERATED = {"index.md", "contributing.md", "changes.md", "reference/python.md", "reference/command-line.md"}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    yield {name: importlib.import_module(name) for name in ("pictures", "reference")}
    for name in ("pictures", "reference"):
        sys.modules.pop(name)


def test_pictures_are_those_that_the_command_draws(site: dict[str, ModuleType]) -> None:
    for name, draw in site["pictures"].PICTURES.items():
        drawn = (ROOT / "docs" / "images" / name).read_text()
        assert drawn == draw(), f"docs/images/{name} is old: run `python scripts/site/pictures.py`"


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


def test_names_with_their_meaning_become_a_table(site: dict[str, ModuleType]) -> None:
    text = "What it is.\n\nfirst    one thing\n         and more of it\nsecond   another | thing\n\nThe end."
    lines = list(site["reference"].docstring(text))
    assert lines == [
        *("What it is.", "", "| | |", "|---|---|"),
        *("| `first` | one thing and more of it |", "| `second` | another \\| thing |", "", "The end.", ""),
    ]


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Without Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Loader)["nav"]
    assert set(_pages(nav)) == GENERATED | {page.name for page in (ROOT / "docs").glob("*.md")}


def _pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for part in nav:
            yield from _pages(part)
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from _pages(part)
