"""What a bench found, as values and as JSON. No torch here: the report and the table are made from this alone.

Bench ─┬─ cases: one engine and strategy, with all its runs in one
       ├─ equivalence: whether they did the same training
       └─ what was asked for, on which machine, by which command
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.atomic import atomic_write
from shardwise.bench.modes import mode_of
from shardwise.bench.results_form import check_bench
from shardwise.errors import ShardwiseError
from shardwise.json_form import WrongForm
from shardwise.profile.memory_ledger import MemoryLedger
from shardwise.regular_file import read_at_most
from shardwise.span import Span

FILE = "bench.json"
"""What a bench leaves in its folder, next to `runs/`."""
_FORMAT = 1
_MOST_BYTES = 512 * 2**20


class InvalidBench(ShardwiseError):  # noqa: N818
    """A folder that holds no bench, or one that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values of one thing that was measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def middle(self) -> tuple[float, float]:
        """The interquartile range: an outlier does not widen it."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An operation of the tape: what on what, when after the step began, and in which row of the ledger."""

    kind: str
    subject: str
    num_bytes: int
    seconds: float
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutline:
    """A unit of the model, in the order of the spec."""

    name: str
    num_params: int
    num_trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCase:
    """The planner's prediction for the same case; None where it has none."""

    allocated_bytes: int
    breakdown_bytes: Mapping[str, int]
    # The highest point of each row, [label, category → bytes], to compare with the ledger.
    entries: tuple[tuple[str, Mapping[str, int]], ...]
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One engine and strategy. Where it did not run, `why_not` says why, and the rest is empty.

    losses             of every step from the first on, the mean over ranks
    grad_norms         of the first steps, of the whole gradient, before clipping
    param_norms        of the first step, parameter by parameter
    dtypes             "compute" (of matrix products), "master", "grads", "optim" → dtypes that were seen
    step_seconds       of blocks of steps, in all runs
    silent_seconds     the same with the wire cut: the same processes at once, whose collectives return at once;
                       `why_not_silent`, if that failed
    first_step_seconds from the start of a process until it had taken a step
    allocated_bytes    the peak of a step, by rank; reserved_bytes: of the caching allocator, on a GPU
    ledgers            of one step, by rank (memory.py)
    sent_bytes         what a rank sends in a step; `calls`: collective → how often
    tape               of rank 0, of the same step as its ledger; buckets: name → units, as it reduces them
    """

    engine: str
    strategy: str
    why_not: str = ""
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    param_norms: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    step_seconds: Spread | None = None
    silent_seconds: Spread | None = None
    why_not_silent: str = ""
    first_step_seconds: Spread | None = None
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    ledgers: tuple[MemoryLedger, ...] = ()
    sent_bytes: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    units: tuple[UnitOutline, ...] = ()
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tape: tuple[Happening, ...] = ()
    predicted: PredictedCase | None = None

    @property
    def name(self) -> str:
        return self.strategy if self.engine == "shardwise" else f"{self.engine} {self.strategy}"

    @property
    def mode(self) -> str:
        """How its steps were run: eager, captured or compiled."""
        return mode_of(self.engine)

    @property
    def ran(self) -> bool:
        return self.step_seconds is not None

    @property
    def peak_bytes(self) -> int:
        """Of the rank with the highest peak."""
        return max(self.allocated_bytes)

    @property
    def peak_rank(self) -> int:
        return self.allocated_bytes.index(self.peak_bytes)

    @property
    def exposed_seconds(self) -> float | None:
        """How much shorter a step is without waiting for other ranks."""
        if self.step_seconds is None or self.silent_seconds is None:
            return None
        return max(0.0, self.step_seconds.median - self.silent_seconds.median)

    @property
    def memory_error(self) -> float | None:
        """Predicted minus measured, relative to measured."""
        if self.predicted is None or not self.allocated_bytes:
            return None
        return self.predicted.allocated_bytes / self.peak_bytes - 1

    @property
    def time_error(self) -> float | None:
        if self.predicted is None or self.predicted.step_seconds is None or self.step_seconds is None:
            return None
        return self.predicted.step_seconds / self.step_seconds.median - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a case is not the same training as the others: one line, and by how many times the rounding tolerance."""

    case: str
    text: str
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Whether all cases that ran did the same training. `largest`: the largest difference, of what is allowed."""

    differences: tuple[Difference, ...]
    largest: float

    @property
    def agrees(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All that was found. `recommended` is an index of `cases`, None where they must not be ranked.

    settings    what all cases share, as the config names it: "task.model", "plan.micro_batch" …
    machine     versions, device, number of ranks; nothing that names the machine
    scaling     rows of report/costs.scaling_data, predicted for more ranks; empty where there is no prediction
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

    def samples_per_s(self, case: CaseResult) -> float | None:
        return None if case.step_seconds is None else self.step_samples / case.step_seconds.median

    def tokens_per_s(self, case: CaseResult) -> float | None:
        if case.step_seconds is None or self.step_tokens is None:
            return None
        return self.step_tokens / case.step_seconds.median

    def save(self, folder: Path) -> Path:
        """Whole, or not at all."""
        path = folder / FILE
        with atomic_write(path) as file:
            file.write(json.dumps(self.to_data(), indent=1, allow_nan=False).encode() + b"\n")
        return path

    def to_data(self) -> dict[str, Any]:
        """In JSON's own types."""
        data = {"format": _FORMAT, **asdict(self)}
        for case, row in zip(self.cases, data["cases"], strict=True):
            row["ledgers"] = [ledger.to_data() for ledger in case.ledgers]
            row["tape"] = [list(asdict(happening).values()) for happening in case.tape]
        return dict(_finite(data))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Bench":
        """Of data that are known to be of the right form (results_form.py)."""
        values = {name: value for name, value in data.items() if name != "format"}
        equivalence = values["equivalence"]
        return cls(
            **{
                **values,
                "cases": tuple(_case(row) for row in values["cases"]),
                "scaling": tuple(values["scaling"]),
                "equivalence": Equivalence(
                    differences=tuple(
                        Difference(**{**row, "excess": float(row["excess"])}) for row in equivalence["differences"]
                    ),
                    largest=float(equivalence["largest"]),
                ),
            }
        )


def load_bench(folder: Path) -> Bench:
    """What a bench left in a folder; `folder` may be the file itself."""
    path = folder / FILE if folder.is_dir() else folder
    try:
        data = json.loads(read_at_most(path, _MOST_BYTES))
    except OSError as error:
        raise InvalidBench(
            f"{folder}: there is no {FILE} ({error.strerror}); `shardwise bench … --out DIR` makes one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidBench(f"{path}: is not JSON ({error})") from error
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, bool) or found != _FORMAT:
        shown = found if isinstance(found, int) and abs(found) < 2**63 else f"{found!r:.40}"
        raise InvalidBench(f"{path}: is of format {shown}, and this Shardwise reads {_FORMAT}: run the bench again")
    try:
        check_bench(data)
    except WrongForm as error:
        raise InvalidBench(f"{path}: is damaged: {error}; run the bench again") from error
    return Bench.from_data(data)


def _case(row: Mapping[str, Any]) -> CaseResult:
    predicted = row["predicted"]
    return CaseResult(
        **{
            **row,
            **{name: tuple(row[name]) for name in ("allocated_bytes", "reserved_bytes")},
            **{name: tuple(map(float, row[name])) for name in ("losses", "grad_norms")},
            "param_norms": {name: float(norm) for name, norm in row["param_norms"].items()},
            **{name: _spread(row[name]) for name in ("step_seconds", "silent_seconds", "first_step_seconds")},
            "dtypes": {name: tuple(seen) for name, seen in row["dtypes"].items()},
            "ledgers": tuple(MemoryLedger.from_data(ledger) for ledger in row["ledgers"]),
            "units": tuple(UnitOutline(**unit) for unit in row["units"]),
            "buckets": {name: tuple(units) for name, units in row["buckets"].items()},
            "tape": tuple(_happening(one) for one in row["tape"]),
            "predicted": None if predicted is None else _predicted(predicted),
        }
    )


def _finite(data: Any) -> Any:
    """The same, with numbers that JSON does not have ("nan", "inf": a training that diverged) as strings."""
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _spread(data: Mapping[str, Any] | None) -> Spread | None:
    return None if data is None else Spread(values=tuple(data["values"]))


def _happening(data: Sequence[Any]) -> Happening:
    kind, subject, num_bytes, seconds, row = data
    return Happening(kind=kind, subject=subject, num_bytes=num_bytes, seconds=seconds, row=row)


def _predicted(data: Mapping[str, Any]) -> PredictedCase:
    entries = tuple((label, parts) for label, parts in data["entries"])
    spans = tuple(Span(*one) for one in data["spans"])
    return PredictedCase(**{**data, "entries": entries, "spans": spans})
