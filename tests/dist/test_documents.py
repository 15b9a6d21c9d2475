"""Every fenced command and piece of Python in README.md and docs/*.md runs, or says why it does not (fenced.py)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fenced import ROOT, Block, Command, blocks_of, pages
from givens import givens
from ranks import run_ranks

from shardwise.doors.cli.app import main

# In the process of the test; all other commands start processes, and cost seconds.
_QUICK = ("plan", "explain", "doctor", "export", "import", "models", "devices")
_LINKED = ("examples", "benchmarks", "accelerate", "scripts")
_LIMIT_SECONDS = 300


def page_parameters() -> list[Any]:
    """A page by what runs in the usual run; once more, with everything, where something is slow."""
    found = []
    for page in pages():
        blocks = blocks_of(page)
        if any(block.is_run and not block.is_slow for block in blocks):
            found.append(pytest.param(page, False, id=page.stem))
        if any(block.is_run and block.is_slow for block in blocks):
            found.append(pytest.param(page, True, id=f"{page.stem}-whole", marks=pytest.mark.whole))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "whole"), page_parameters())
def test_what_a_page_shows_runs(
    page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Cells of tables are not broken.
    monkeypatch.setenv("COLUMNS", "120")
    for name in _LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks_of(page):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.text + "\n")
        elif block.is_run and (whole or not block.is_slow):
            run_block(block, folder=tmp_path, capsys=capsys)


def run_block(block: Block, *, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if block.is_python:
        names = tuple(name for name in block.marks.get("given", "").split(",") if name)
        run_ranks(run_python, num_ranks=int(block.marks.get("ranks", "2")), args=(block.text, names, str(folder)))
        return
    for command in block.commands():
        output = run_command(command, expected_code=int(block.marks.get("exit", "0")), folder=folder, capsys=capsys)
        if block.marks.get("output") != "varies":
            assert_shown(command, output, where=block.name)


def run_python(rank: int, code: str, names: tuple[str, ...], folder: str) -> None:
    # Of ten steps, in which an optimizer is tried before it is prepared, two: Muon's take long on a CPU without bf16.
    with _inside(folder), patch("shardwise.engine.optimizer.reach.NUM_STEPS", 2):
        exec(compile(code, "block", "exec"), {"__name__": "block", **givens(names, rank=rank)})


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """In this folder, whose files can be imported, and nothing of them stays."""
    before, modules = Path.cwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.chdir(before)
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(folder):
                sys.modules.pop(name)


def run_command(command: Command, *, expected_code: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What it prints, if it ends as the page says."""
    words = command.line.split()
    if words[0] == "shardwise" and words[1] in _QUICK and not set("&|>;") & set(command.line):
        capsys.readouterr()
        try:
            main(words[1:])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        output = said.out + said.err
    else:
        done = subprocess.run(
            ["bash", "-c", command.line],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        code, output = done.returncode, done.stdout + done.stderr
    assert code == expected_code, f"{command.line}: exit code {code}\n{output}"
    return output


def assert_shown(command: Command, output: str, *, where: str) -> None:
    """What the page shows comes in the output, in that order; line breaks and padding do not count."""
    flat, at = " ".join(output.split()), 0
    for piece in command.pieces():
        found = flat.find(piece, at)
        assert found >= 0, f"{where}: $ {command.line}\nthe page shows\n{piece}\nbut it prints\n{output}"
        at = found + len(piece)


def test_every_reason_for_not_running_is_a_reason() -> None:
    for page in pages():
        for block in blocks_of(page):
            reason = block.marks.get("not run")
            assert reason is None or len(reason) >= len("pseudocode"), f"{block.name}: {reason}"
            assert block.marks.get("run") in (None, "whole"), f"{block.name}: run: {block.marks['run']}"
            assert block.marks.get("output") in (None, "varies"), f"{block.name}: output: {block.marks['output']}"


def test_every_page_of_the_site_is_looked_at() -> None:
    looked_at = {page.name for page in pages()}
    assert {page.name for page in (ROOT / "docs").rglob("*.md")} <= looked_at


def test_lines_that_are_quoted_as_messages_are_those_that_tests_saw() -> None:
    """On the page about what goes wrong: each is on a page whose lines a test compares."""
    seen = " ".join(
        " ".join((ROOT / "docs" / name).read_text().split()) for name in ("reliability.md", "engine.md", "launch.md")
    )
    text = (ROOT / "docs" / "when-it-goes-wrong.md").read_text()
    for start in (
        "NonFinite: step 7",
        "all 2 ranks were given",
        "shardwise [rank 0]: rank 1",
        "RanksMissing: rank 1, 3",
    ):
        quoted = " ".join(text[text.index(start) :].partition("\n\n")[0].split()).partition("`")[0]
        assert quoted in seen, quoted
