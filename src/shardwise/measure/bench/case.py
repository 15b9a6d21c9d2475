"""Collects the runs of one case of a bench into one CaseResult. No torch here."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.measure.bench.case_result import CaseResult, PredictedCase
from shardwise.measure.bench.contestants import plan_for, why_not
from shardwise.measure.bench.run_files import Found
from shardwise.measure.bench.spread import Spread
from shardwise.plan import Plan
from shardwise.plan.placement import AUTO, STRATEGIES
from shardwise.training.config.config import TrainConfig

Ranks = Sequence[Found]
"""The results of the ranks of one run, rank 0 first."""

NOT_REACHED = "the bench ended before its turn"
_OF_RANK_0 = ("grad_norms", "param_norms", "calls", "units", "buckets", "tape", "tape_seconds")


@dataclass(slots=True, kw_only=True)
class Case:
    """An engine and a strategy, with the results so far.

    failed           a run of it failed
    why_not_silent   why its run without communication failed, if it did
    """

    engine: str
    strategy: str
    plan: Plan
    why_not: str = ""
    failed: bool = False
    why_not_silent: str = ""
    predicted: PredictedCase | None = None
    runs: list[Ranks] = field(default_factory=list)
    silent: list[Ranks] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in tables."""
        return CaseResult(engine=self.engine, strategy=self.strategy).name

    def fail(self, why_not: str) -> None:
        """Drop all measurements: a case that does not run reliably is not ranked."""
        self.why_not, self.failed = why_not, True
        self.runs.clear()
        self.silent.clear()

    def result(self) -> CaseResult:
        """Combine all runs; details come from the first."""
        if not self.runs:
            why_not = self.why_not or NOT_REACHED
            return CaseResult(engine=self.engine, strategy=self.strategy, why_not=why_not, predicted=self.predicted)
        ranks = self.runs[0]
        first = ranks[0]
        return CaseResult(
            engine=self.engine,
            strategy=self.strategy,
            losses=tuple(
                math.fsum(values) / len(ranks) for values in zip(*(rank.losses for rank in ranks), strict=True)
            ),
            dtypes={
                kind: tuple(sorted({name for rank in ranks for name in rank.dtypes.get(kind, ())}))
                for kind in first.dtypes
            },
            step_seconds=_steps(self.runs),
            silent_seconds=_steps(self.silent),
            why_not_silent=self.why_not_silent,
            first_step_seconds=Spread(values=tuple(max(r.first_step_seconds for r in run) for run in self.runs)),
            allocated_bytes=_known(rank.allocated_bytes for rank in ranks),
            reserved_bytes=_known(rank.reserved_bytes for rank in ranks),
            ledgers=tuple(rank.ledger for rank in ranks if rank.ledger is not None),
            sent_bytes=max(_known(rank.sent_bytes for rank in ranks), default=None),
            predicted=self.predicted,
            **{name: getattr(first, name) for name in _OF_RANK_0},
        )


def cases_of(config: TrainConfig, *, engines: Sequence[str], strategies: Collection[str]) -> list[Case]:
    """Return engines × strategies, the simplest strategy first, each with the reason if the engine cannot run it.

    The plan of `auto` is chosen later (prediction.py), since it depends on the devices.
    """
    cases = []
    for engine in engines:
        for strategy in (*STRATEGIES, AUTO):
            if strategy in strategies:
                why = why_not(engine, strategy, config)
                plan = config.plan if why else plan_for(engine, strategy, config.plan)
                cases.append(Case(engine=engine, strategy=strategy, plan=plan, why_not=why))
    return cases


def _steps(runs: Iterable[Ranks]) -> Spread | None:
    """Return the seconds per step of each block of each run. A block lasts until its slowest rank is done."""
    blocks = [max(block) for run in runs for block in zip(*(rank.block_seconds for rank in run), strict=True)]
    return Spread(values=tuple(blocks)) if blocks else None


def _known(values: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(value for value in values if value is not None)
