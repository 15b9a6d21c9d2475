"""The instructions of a step, with bytes in place of seconds, which the page computes for its links and devices.

The planner's own executor makes them; all seconds that it would multiply or pass on are `Priced`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwise.hardware import Cluster
from shardwise.planner.job import Job
from shardwise.planner.sizes import sizes_of
from shardwise.planner.time.collective import Ring, Rings
from shardwise.planner.time.host_traffic import HostTraffic
from shardwise.planner.time.instructions import schedule_by
from shardwise.planner.time.queues import CALL, COMPUTE, LOAD, MARK, SEND, STREAM, WAIT, Instruction
from shardwise.planner.time.time_executor import TimeExecutor

PIECE, COPY, UPDATE, CALLED, SENT, WAITED, MARKED, STREAMED, LOADED = range(9)
"""The kinds of exported instructions; queues.js has the same list."""

RINGS = ("shard", "replicate", "world")
COLLECTIVES = ("gather", "all_reduce")
HOST_COPIES = ("one way", "both ways", "saved")
"""Copies to or from host memory; of what a unit has saved, the bytes depend on the batch."""


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


class PricedHostTraffic(HostTraffic):
    """Records how many bytes are copied to and from host memory."""

    def copy_seconds(self, num_bytes: float, *, both_ways: bool = False) -> float:
        return Priced("both ways" if both_ways else "one way", num_bytes)


@dataclass(slots=True, kw_only=True)
class PricedExecutor(TimeExecutor):
    """Records what is copied and updated, instead of how long that takes."""

    host_traffic: ClassVar[type[HostTraffic]] = PricedHostTraffic

    def _copy(self, name: str, num_bytes: float, *, launch: float = 0.0) -> Instruction:
        return self._work(name, launch, Priced("copy", num_bytes))

    def _update_seconds(self, num_elements: int, num_tensors: int) -> tuple[float, float]:
        return 0.0, Priced("update", num_elements, num_tensors)


def priced_step(
    job: Job, *, cluster: Cluster, note: Callable[[float], Any], number: Callable[[str, str], int]
) -> tuple[list[list[Any]], int]:
    """Return (the instructions of a job's step as rows of JSON, how many at their end leave a copy in flight).

    The latter are run once before a step, as the end of the previous one. `cluster` may be any with GPUs, since none of
    its numbers is used. `note` returns what stands for a number, `number` that of a name or a unit in its table.
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
        buckets={bucket.name: bucket for bucket in job.program.buckets},
    )
    schedule = schedule_by(executor)
    rows = [
        [kind, number("names", one.name), *more]
        for one in schedule.last
        for kind, *more in [_row(one, executor, note=note, number=number)]
    ]
    return rows, len(schedule.update)


def _row(
    one: Instruction, executor: TimeExecutor, *, note: Callable[[float], Any], number: Callable[[str, str], int]
) -> list[Any]:
    """Return [kind, …] as queues.js reads it after the name."""
    if one.what == COMPUTE and one.number < executor.num_pieces:
        return [PIECE, one.number]
    if one.what == COMPUTE:
        launch, kernel, _ = executor.works[one.number - executor.num_pieces]
        assert isinstance(kernel, Priced)
        if kernel.kind == "update":
            return [UPDATE, note(launch), *map(note, kernel.amounts)]
        return [COPY, note(launch), note(kernel.amounts[0]), kernel.times]
    if one.what == SEND:
        sent = one.seconds
        assert isinstance(sent, Priced)
        ring, kind = RINGS.index(sent.ring), COLLECTIVES.index(sent.kind)
        return [SENT, note(one.launch), ring, kind, note(sent.amounts[0]), sent.times]
    if one.what == MARK:
        return [MARKED, one.number, one.seconds]
    if one.what in (STREAM, LOAD):
        return _host_row(one, note=note, number=number)
    assert one.what in (CALL, WAIT)
    return [CALLED if one.what == CALL else WAITED, note(one.launch)]


def _host_row(one: Instruction, *, note: Callable[[float], Any], number: Callable[[str, str], int]) -> list[Any]:
    """Return [kind, launch, kind of copy, bytes or unit], and for a load the name of the update that it waits for."""
    unit, copied = one.name.partition(" ")[2], one.seconds
    if isinstance(copied, Priced):
        amount = [HOST_COPIES.index(copied.kind), note(copied.amounts[0])]
    else:
        amount = [HOST_COPIES.index("saved"), number("units", unit)]
    if one.what == STREAM:
        return [STREAMED, note(one.launch), *amount]
    return [LOADED, note(one.launch), *amount, number("names", f"update {unit}")]
