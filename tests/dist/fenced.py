"""The fenced blocks of README.md and docs/*.md: which are commands or code, and what the marks before them say.

A mark is an HTML comment on a line of its own directly before the fence, so it does not show on the page:

    <!-- not run: needs a GPU -->     why nothing runs it
    <!-- run: whole -->               only with `pytest --whole`, because it takes long
    <!-- output: varies -->           run, but its output is not compared with what the page shows
    <!-- exit: 1 -->                  the exit code of its commands (0)
    <!-- file: NAME -->               not run, but written into the page's folder under this name
    <!-- given: model, optimizer -->  Python that goes on from these (givens.py)
    <!-- ranks: 1 -->                 how many ranks run the Python (2)

Blocks of one page run in its order, in one folder. Without a mark, a block is run and its output compared.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = ("not run", "run", "output", "exit", "file", "given", "ranks")
_COMMAND_LANGUAGES = ("bash", "sh", "console")
# A block without a language whose first word is one of these is commands.
_PROGRAMS = ("shardwise", "python", "make", "torchrun", "accelerate", "pip", "$")
_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w-]*)\s*")
_MARK = re.compile(r" *<!-- (?P<name>[a-z ]+): (?P<value>.*?) -->")
# Stands for output that the page leaves out.
_GAP = re.compile(r"[…⋮]")


class WrongMark(AssertionError):  # noqa: N818 - reads as the first word of pytest's line
    """A mark that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What follows a `$`, and what the page shows of its output."""

    line: str
    output: str = ""

    def pieces(self) -> list[str]:
        """The shown output without line breaks, cut where the page leaves something out."""
        return [flat for part in _GAP.split(self.output) if (flat := " ".join(part.split()))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_python(self) -> bool:
        return self.language == "python"

    @property
    def is_commands(self) -> bool:
        first = self.text.split(maxsplit=1)[:1]
        return self.language in _COMMAND_LANGUAGES or (not self.language and first != [] and first[0] in _PROGRAMS)

    @property
    def is_run(self) -> bool:
        return (self.is_python or self.is_commands) and not {"file", "not run"} & self.marks.keys()

    @property
    def is_slow(self) -> bool:
        return self.marks.get("run") == "whole"

    def commands(self) -> list[Command]:
        """Lines after a `$`, each with the output below it; without any `$`, every line that is no comment."""
        lines = self.text.splitlines()
        if not any(line.startswith("$ ") for line in lines):
            plain = (line.partition(" #")[0].strip() for line in lines)
            return [Command(line=line) for line in plain if line and not line.startswith("#")]
        found: list[Command] = []
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append(Command(line=line.strip(), output=output))
        return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks, in order."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence, mark = _FENCE.fullmatch(lines[number]), _MARK.fullmatch(lines[number])
        if fence is not None:
            end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == fence["ticks"])
            text = "\n".join(line[len(fence["indent"]) :] for line in lines[number + 1 : end])
            found.append(
                Block(page=page.name, line=number + 1, language=fence["language"], text=text, marks=dict(marks))
            )
            number = end
        if mark is not None and mark["name"] in MARKS:
            marks[mark["name"]] = mark["value"]
        else:
            if marks and fence is None:
                raise WrongMark(f"{page.name}:{number + 1}: a mark ({', '.join(marks)}) that no fenced block follows")
            marks = {}
        number += 1
    return found
