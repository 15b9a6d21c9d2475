"""What the marked tests of a run showed of each case → the rows of the page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reliability.ledger import OUTCOMES, Claim

STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
NEEDS_GPU = "skipped: needs a GPU"
UNTESTED = "not tested"
# The way out stands at a line's end, so a line is cut only where it would be a paragraph.
LONGEST_LINE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one test showed. `trouble` is empty if it passed, else why there is nothing to show."""

    claims: tuple[Claim, ...]
    lines: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the page: a case, and what all tests that showed the same say of it."""

    case: str
    under: tuple[str, ...]
    outcome: str
    line: str

    @property
    def shown(self) -> bool:
        """Whether it was seen, or this machine has no GPU to see it on."""
        return self.outcome in (*OUTCOMES, NEEDS_GPU)


def rows(cases: Iterable[str], *, findings: Sequence[Finding]) -> list[Row]:
    """The rows of these cases in order; a case of which tests showed different things has several."""
    found = []
    for case in cases:
        by_outcome: dict[str, list[tuple[Claim, str]]] = {}
        for finding in findings:
            for claim in finding.claims:
                if claim.case == case:
                    outcome, line = _shown(claim, finding)
                    by_outcome.setdefault(outcome, []).append((claim, line))
        for outcome, seen in by_outcome.items():
            under = ordered(name for claim, _ in seen for name in claim.under)
            line = next((line for _, line in seen if line), "")
            found.append(Row(case=case, under=under, outcome=outcome, line=line))
        if not by_outcome:
            found.append(Row(case=case, under=(), outcome=UNTESTED, line=""))
    return found


def _shown(claim: Claim, finding: Finding) -> tuple[str, str]:
    """The outcome and the line of one test. Lines are of the claim that something is said, if the test makes one."""
    if finding.trouble:
        return finding.trouble, ""
    if claim.outcome == "right":
        others = any(other.outcome != "right" for other in finding.claims)
        return "right", "" if others or not finding.lines else finding.lines[0]
    return (claim.outcome, finding.lines[0]) if finding.lines else ("FAILED: no line was shown", "")


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once: strategies from ddp to fsdp, then others as they come."""
    once = tuple(dict.fromkeys(names))
    return tuple(name for name in STRATEGIES if name in once) + tuple(name for name in once if name not in STRATEGIES)


def readable(line: str, *, places: Mapping[Path, str]) -> str:
    """The first line, with the paths of this run replaced, the longest first, and cut if it is a paragraph."""
    text = line.strip().splitlines()[0] if line.strip() else ""
    for path in sorted(places, key=lambda path: -len(str(path))):
        text = text.replace(f"{path}/", f"{places[path]}/" if places[path] else "").replace(str(path), places[path])
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE].rsplit(" ", 1)[0] + " …"
