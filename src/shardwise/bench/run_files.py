"""One run of a bench: what its ranks are told, and what each of them found. No torch here.

The launcher writes `asked.json` into the folder of the run and starts the ranks (worker.py), fresh processes each;
rank r leaves `rank-r.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.bench.case_result import Happening, UnitOutline
from shardwise.profile.memory_ledger import MemoryLedger
from shardwise.train.config import TrainConfig

ASKED = "asked.json"


def found_file(folder: Path, *, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A training under one engine and strategy, which is the config's plan's.

    blocks × block_steps   steps that are timed, after `warm_up` others
    silent                 without communication: every rank is there and computes, and collectives return at once
    detailed               also a recorded step: its ledger, its tape, its dtypes and what it sends
    started                when its processes were started, in seconds of time.time()
    """

    config: TrainConfig
    engine: str
    warm_up: int = 5
    blocks: int = 4
    block_steps: int = 5
    silent: bool = False
    detailed: bool = True
    started: float = 0.0

    def to_data(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {name: getattr(self, name) for name in self.__slots__} | {"config": self.config.to_dict()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "BenchRun":
        return cls(**{**data, "config": TrainConfig.from_dict(data["config"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank found; see results.CaseResult for the words. What a run was not asked for is empty."""

    rank: int
    num_ranks: int
    environment: Mapping[str, Any]
    losses: tuple[float, ...]
    block_seconds: tuple[float, ...]
    first_step_seconds: float
    step_samples: int
    step_tokens: int | None
    grad_norms: tuple[float, ...] = ()
    param_norms: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    ledger: MemoryLedger | None = None
    sent_bytes: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    units: tuple[UnitOutline, ...] = ()
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tape: tuple[Happening, ...] = ()
    tape_seconds: float | None = None

    def save(self, folder: Path) -> None:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["ledger"] = None if self.ledger is None else self.ledger.to_data()
        data["units"] = [[unit.name, unit.num_params, unit.num_trained] for unit in self.units]
        data["tape"] = [[one.kind, one.subject, one.num_bytes, one.seconds, one.row] for one in self.tape]
        found_file(folder, rank=self.rank).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, rank: int) -> "Found":
        data = json.loads(found_file(folder, rank=rank).read_text(encoding="utf-8"))
        return cls(
            **{
                **data,
                **{name: tuple(data[name]) for name in ("losses", "block_seconds", "grad_norms")},
                "dtypes": {name: tuple(seen) for name, seen in data["dtypes"].items()},
                "ledger": None if data["ledger"] is None else MemoryLedger.from_data(data["ledger"]),
                "units": tuple(UnitOutline(name=n, num_params=p, num_trained=t) for n, p, t in data["units"]),
                "buckets": {name: tuple(units) for name, units in data["buckets"].items()},
                "tape": tuple(
                    Happening(kind=kind, subject=subject, num_bytes=size, seconds=seconds, row=row)
                    for kind, subject, size, seconds, row in data["tape"]
                ),
            }
        )
