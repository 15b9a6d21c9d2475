"""The files of one run of a bench: the request to its ranks, and the result of each. No torch here.

The launcher writes `asked.json` into the folder of the run and starts fresh processes (worker.py); rank r writes
`rank-r.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.base.files.data_file import read_json
from shardwise.measure.bench.case_result import UnitOutline
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.profile.memory_ledger import MemoryLedger
from shardwise.training.config.config import TrainConfig

ASKED = "asked.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A request for one run, under one engine and the strategy of the config's plan.

    blocks × block_steps   steps that are timed, after `warm_up` others
    silent                 without communication: every rank computes, and collectives return at once
    detailed               also record a step: its ledger, tape, dtypes and sent bytes
    started                when the processes were started, in seconds of time.time()
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
        return {name: getattr(self, name) for name in self.__slots__} | {"config": self.config.to_dict()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "BenchRun":
        return cls(**{**data, "config": TrainConfig.from_dict(data["config"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of one rank; the fields are explained in CaseResult. What was not requested is empty."""

    rank: int
    environment: Mapping[str, Any]
    step_samples: int
    step_tokens: int | None = None
    losses: tuple[float, ...] = ()
    block_seconds: tuple[float, ...] = ()
    first_step_seconds: float = 0.0
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
        data = asdict(self) | {"ledger": None if self.ledger is None else self.ledger.to_data()}
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, rank: int) -> "Found":
        data = read_json(folder / f"rank-{rank}.json", most_bytes=2**30, finite=False)
        return cls(
            **{
                **data,
                **{name: tuple(data[name]) for name in ("losses", "block_seconds", "grad_norms")},
                "dtypes": {name: tuple(seen) for name, seen in data["dtypes"].items()},
                "ledger": None if data["ledger"] is None else MemoryLedger.from_data(data["ledger"]),
                "units": tuple(UnitOutline(**unit) for unit in data["units"]),
                "buckets": {name: tuple(units) for name, units in data["buckets"].items()},
                "tape": tuple(Happening(**one) for one in data["tape"]),
            }
        )
