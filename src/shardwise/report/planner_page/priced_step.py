"""The instructions of a step, with bytes in place of seconds, which the page computes for its links and devices.

The planner's own executor makes them; all seconds that it would multiply or pass on are `Priced`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.hardware import Cluster
from shardwise.planner.job import Job
from shardwise.planner.sizes import sizes_of
from shardwise.planner.time.collective import Ring, Rings
from shardwise.planner.time.instructions import schedule_by
from shardwise.planner.time.queues import CALL, COMPUTE, MARK, SEND, WAIT, Instruction
from shardwise.planner.time.time_executor import TimeExecutor

PIECE, COPY, UPDATE, CALLED, SENT, WAITED, MARKED = range(7)
"""The kinds of exported instructions; queues.js has the same list."""

RINGS = ("shard", "replicate", "world")
COLLECTIVES = ("gather", "all_reduce")


class Priced(float):
    """Seconds that are not known yet: `times` × the seconds of `kind` for these `amounts`."""

    kind: str
    amounts: tuple[float, ...]
    ring: str
    times: int

    def __new__(cls, kind: str, *amounts: float, ring: str = "", times: int = 1) -> "Priced":
        priced = super().__new__(cls, 0.0)
        priced.kind, priced.amounts, priced.ring, priced.times = kind, amounts, ring, times
        return priced

    def __rmul__(self, times: float) -> "Priced":
        return Priced(self.kind, *self.amounts, ring=self.ring, times=int(times) * self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRing(Ring):
    """A ring by its name; the page knows its links."""

    name: str

    def gather_seconds(self, num_bytes: float) -> float:
        return Priced("gather", num_bytes, ring=self.name)

    def all_reduce_seconds(self, num_bytes: float) -> float:
        return Priced("all_reduce", num_bytes, ring=self.name)

    def broadcast_seconds(self, num_bytes: float) -> float:
        # Takes as long as a gather (collective.py).
        return Priced("gather", num_bytes, ring=self.name)


@dataclass(slots=True, kw_only=True)
class PricedExecutor(TimeExecutor):
    """Records what is copied and updated, instead of how long that takes."""

    def _copy(self, name: str, num_bytes: float, *, launch: float = 0.0) -> Instruction:
        return self._work(name, launch, Priced("copy", num_bytes))

    def _update_seconds(self, num_elements: int, num_tensors: int) -> tuple[float, float]:
        return 0.0, Priced("update", num_elements, num_tensors)


def priced_step(job: Job, *, cluster: Cluster, note: Callable[[float], Any]) -> tuple[list[list[Any]], int]:
    """Return (the instructions of a job's step as rows of JSON, how many at their end leave a collective in flight).

    The latter are run once before a step, as the end of the previous one. `cluster` may be any with GPUs, since none of
    its numbers is used. `note` returns what stands for a number.
    """
    assert job.plan.mesh is not None
    lengths = {"shard": job.plan.mesh.shard, "replicate": job.plan.mesh.replicate, "world": job.plan.mesh.num_ranks}
    executor = PricedExecutor(
        job=job,
        cluster=cluster,
        rings=Rings(**{name: PricedRing(name=name, num_ranks=length) for name, length in lengths.items()}),
        optimizer="adamw",
        clips=False,
        sizes=sizes_of(job.spec, plan=job.plan),
        # Of the reference host; the page scales it for other hosts.
        overhead=job.engine.overhead,
        num_pieces=sum(bool(stream.ops) for _, stream in job.streams),
        members={bucket.name: bucket.units for bucket in job.program.buckets},
    )
    schedule = schedule_by(executor)
    return [_row(one, executor, note=note) for one in schedule.last], len(schedule.update)


def _row(one: Instruction, executor: TimeExecutor, *, note: Callable[[float], Any]) -> list[Any]:
    """Return [kind, name, …] as queues.js reads it."""
    if one.what == COMPUTE and one.number < executor.num_pieces:
        return [PIECE, one.name, one.number]
    if one.what == COMPUTE:
        launch, kernel, _ = executor.works[one.number - executor.num_pieces]
        assert isinstance(kernel, Priced)
        if kernel.kind == "update":
            return [UPDATE, one.name, note(launch), *map(note, kernel.amounts)]
        return [COPY, one.name, note(launch), note(kernel.amounts[0]), kernel.times]
    if one.what == SEND:
        sent = one.seconds
        assert isinstance(sent, Priced)
        ring, kind = RINGS.index(sent.ring), COLLECTIVES.index(sent.kind)
        return [SENT, one.name, note(one.launch), ring, kind, note(sent.amounts[0]), sent.times]
    if one.what == MARK:
        return [MARKED, one.name, one.number, one.seconds]
    assert one.what in (CALL, WAIT)
    return [CALLED if one.what == CALL else WAITED, one.name, note(one.launch)]
