"""Row 16: hostile checkpoints, configs, results and names, in a process that has little memory to spare."""

import multiprocessing
import os
import resource
from html.parser import HTMLParser
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos_rows.commands import Accepted, command
from chaos_rows.hostile_objects import SPARSE_BYTES, TAGS, all_cases
from scorecard import Asked, Tally

# What a command may take beyond what the process has when it starts; each bomb here asks for far more.
_SPARE_BYTES = 2 * 2**30
_LIMIT_SECONDS = 60.0
_START_SECONDS = 300.0


class Elements(HTMLParser):
    """The elements of a page, and the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def try_cases(folder: str, names: list[str], pipe: Connection) -> None:
    """In a process of its own: for each case what is wrong with how it ended, or ""."""
    cases = all_cases()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, used + _SPARE_BYTES))
    pipe.send("ready")
    for number, name in enumerate(names):
        where = Path(folder, f"{os.getpid()}-{number}")
        where.mkdir()
        (where / "victim").write_text("all of it")
        inside = where / "inside"
        inside.mkdir()
        os.chdir(inside)
        pipe.send(wrong_with(cases[name], where=where))


def wrong_with(case: Any, *, where: Path) -> str:
    """Run the commands of a case. All that they may write is in `inside`."""
    commands = case(where / "inside")
    for arguments in commands:
        shown = " ".join(arguments[:2])
        try:
            answer = command(*arguments)
        except Accepted:
            answer = None
        except BaseException as error:
            return f"{shown}: {type(error).__name__}: {str(error)[:300]}"
        if answer is not None and answer.code not in (0, 2):
            return f"{shown}: exit code {answer.code}: {answer.err[:300]}"
        if answer is not None and answer.code == 2 and len(answer.err.splitlines()) not in (1, 3):
            return f"{shown}: {len(answer.err.splitlines())} lines: {answer.err[:300]}"
    outside = sorted(path.name for path in where.iterdir())
    if outside != ["inside", "victim"] or (where / "victim").read_text() != "all of it":
        return f"something ran, or was written outside: {outside}"
    page = where / "inside" / "report.html"
    return wrong_with_page(page.read_text()) if page.exists() else ""


def wrong_with_page(text: str) -> str:
    found = Elements(text)
    if "img" in found.tags or any(name.startswith("on") for name in found.attributes):
        return "tags of the data are tags of the page"
    return "a script of the data is in the page" if "alert(1)</script>" in text and TAGS in text else ""


def hostile(asked: Asked) -> Tally:
    tally = Tally()
    left = list(all_cases())
    if SPARSE_BYTES < 4 * _SPARE_BYTES:
        raise AssertionError("the bombs are too small to be noticed")
    context = multiprocessing.get_context("spawn")
    while left:
        ours, theirs = context.Pipe()
        process = context.Process(target=try_cases, args=(str(asked.folder), left, theirs))
        process.start()
        theirs.close()
        if not ours.poll(_START_SECONDS) or ours.recv() != "ready":
            raise AssertionError(f"the process that tries them did not start within {_START_SECONDS:g} s")
        while left:
            name = left.pop(0)
            with tally.trying(name):
                try:
                    told = ours.recv() if ours.poll(_LIMIT_SECONDS) else None
                except EOFError:
                    told = None
                assert told is not None, f"no answer within {_LIMIT_SECONDS:g} s, or the process died"
                assert told == "", told
            if told is None:
                break
        process.kill()
        process.join()
    return tally
