"""The results of a bench, as values and as JSON. No torch here: the report and the table are made from this alone.

Bench ─┬─ cases: each engine and strategy, its runs combined (case_result.py)
       ├─ equivalence: whether they did the same training
       └─ the request, the machine, the command
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.base.files.form import WrongForm
from shardwise.base.vocabulary.html_table import html_table
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results_form import read_bench

FILE = "bench.json"
"""The result file in the folder of a bench."""
_FORMAT = 1
_MOST_BYTES = 512 * 2**20


class InvalidBench(ShardwiseError):  # noqa: N818
    """A bench that cannot start, or a folder without a readable bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference of a case from the others: one line, and the difference in multiples of the rounding tolerance."""

    case: str
    text: str
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The differences between cases that ran, if any. `largest`: the largest one over its tolerance."""

    differences: tuple[Difference, ...]
    largest: float

    @property
    def agrees(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The results of a bench. `recommended` is an index of `cases`, None if they cannot be ranked.

    settings    what all cases share, as the config names it: "task.model", "plan.micro_batch" …
    machine     versions, device, number of ranks; nothing that names the machine
    scaling     rows of report/text/costs.scaling_data, predicted for more ranks; empty without a prediction
    """

    name: str
    command: str
    made: str
    num_ranks: int
    step_samples: int
    step_tokens: int | None
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    equivalence: Equivalence
    recommended: int | None = None
    why: str = ""
    capacity_bytes: int | None = None
    scaling: tuple[Mapping[str, Any], ...] = ()

    @property
    def ran(self) -> list[CaseResult]:
        """The cases that ran."""
        return [case for case in self.cases if case.ran]

    def _repr_html_(self) -> str:
        """Return the measured cases and the verdict as a table for notebooks."""
        heads = ("case", "ms per step", "samples/s", "peak per rank")
        rows = [
            (
                case.name,
                "–" if case.step_seconds is None else f"{case.step_seconds.median * 1e3:.4g}",
                "–" if (speed := self.samples_per_s(case)) is None else f"{speed:,.4g}",
                bytes_text(max(case.allocated_bytes)) if case.allocated_bytes else "–",
            )
            for case in self.ran
        ]
        return html_table(heads, rows, title=f"{self.name}, {self.num_ranks} ranks", text=self.why)

    def samples_per_s(self, case: CaseResult) -> float | None:
        return None if case.step_seconds is None else self.step_samples / case.step_seconds.median

    def tokens_per_s(self, case: CaseResult) -> float | None:
        if case.step_seconds is None or self.step_tokens is None:
            return None
        return self.step_tokens / case.step_seconds.median

    def save(self, folder: Path) -> Path:
        """Write the file atomically."""
        path = folder / FILE
        with atomic_write(path) as file:
            file.write(json.dumps(self.to_data(), indent=1, allow_nan=False).encode() + b"\n")
        return path

    def to_data(self) -> dict[str, Any]:
        data = {"format": _FORMAT, **asdict(replace(self, cases=())), "cases": [case.to_data() for case in self.cases]}
        return dict(_finite(data))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Bench":
        """Read JSON types, or raise WrongForm."""
        values = read_bench(data)
        differences = tuple(Difference(**one) for one in values["equivalence"]["differences"])
        equivalence = Equivalence(differences=differences, largest=values["equivalence"]["largest"])
        return cls(**{**values, "equivalence": equivalence})


def load_bench(folder: Path) -> Bench:
    """Read the bench in a folder; `folder` may be the file itself."""
    path = folder / FILE if folder.is_dir() else folder
    try:
        data = read_json(path, most_bytes=_MOST_BYTES)
    except UnreadableFile as error:
        if error.is_missing:
            line = f"{folder}: there is no {FILE} in it; `shardwise bench … --out DIR` makes one"
            raise InvalidBench(line) from error
        raise InvalidBench(f"{path}: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, bool) or found != _FORMAT:
        shown = found if isinstance(found, int) and abs(found) < 2**63 else f"{found!r:.40}"
        raise InvalidBench(f"{path}: is of format {shown}, and this Shardwise reads {_FORMAT}: run the bench again")
    try:
        return Bench.from_data(data)
    except WrongForm as error:
        raise InvalidBench(f"{path}: is damaged: {error}; run the bench again") from error


def _finite(data: Any) -> Any:
    """Replace numbers that JSON does not have (nan, inf: a training that diverged) by strings."""
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
