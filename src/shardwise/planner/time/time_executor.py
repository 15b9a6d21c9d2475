"""The executor on seconds: the operations of a step program → instructions for the queues."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, assert_never

from shardwise.hardware import Cluster
from shardwise.planner.engine_model import Overhead
from shardwise.planner.fold import skipped_action
from shardwise.planner.job import Job
from shardwise.planner.time.collective import Ring, Rings
from shardwise.planner.time.compute import copy_seconds, update_seconds
from shardwise.planner.time.host_traffic import HostTraffic
from shardwise.planner.time.muon_update import muon_seconds
from shardwise.planner.time.queues import CALL, COMPUTE, SEND, WAIT, Instruction, WorkSeconds
from shardwise.planner.whole_matrices import MASTER_BYTES, UnitSizes, matrix_sizes
from shardwise.program import Bucket, Kind, Operation, Row, Trigger
from shardwise.program.compiled_program import Action
from shardwise.program.rules.context import is_in_backward

# A float64.
_NORM_BYTES = 8

# Rows with the operations of all units, one after the other.
_ALL_UNITS = (Trigger.BACKWARD_DONE, Trigger.AFTER_STEP)


@dataclass(slots=True, kw_only=True)
class TimeExecutor:
    """Writes the instructions of one job.

    works        work in addition to the model's pieces
    overlap      the communication that runs during computation (systems.py)
    num_pieces   number of those pieces; they are numbered before `works`
    buckets      the buckets of gradients, by name
    host         the traffic with host memory
    """

    host_traffic: ClassVar[type[HostTraffic]] = HostTraffic

    job: Job
    cluster: Cluster
    rings: Rings
    optimizer: str
    clips: bool
    sizes: Mapping[str, UnitSizes]
    overhead: Overhead
    num_pieces: int
    buckets: Mapping[str, Bucket]
    overlap: str = "all"
    works: list[WorkSeconds] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    _called: set[str] = field(default_factory=set)
    # Position of the last wait for a gather, by the trigger of its row.
    _last_wait: dict[Trigger, int] = field(default_factory=dict)
    host: HostTraffic = field(init=False)

    def __post_init__(self) -> None:
        self._start_host_traffic()

    def _start_host_traffic(self) -> None:
        self.host = self.host_traffic(job=self.job, cluster=self.cluster, sizes=self.sizes, overhead=self.overhead)

    def begin(self) -> list[Instruction]:
        """Start a new pass and return its list of instructions."""
        self.instructions, self._last_wait = [], {}
        self.ready.clear()
        self._called.clear()
        self._start_host_traffic()
        return self.instructions

    def action(self, operation: Operation, row: Row) -> Action:
        return partial(self._issue, operation, row)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        if not self.job.engine.keeps_program_order:
            return None
        return skipped_action(self, operation, row, called=self._called)

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    def _issue(self, operation: Operation, row: Row) -> None:
        """Append the instructions of an operation.

        If gathers do not wait for computation, one begins while the previous unit computes: its instructions are
        inserted before the last wait for another gather.
        """
        found = self.instructions
        if operation.kind is Kind.WAIT_GATHER:
            self._last_wait[row.trigger] = len(found)
        if operation.kind is Kind.GATHER and self.overhead.gathers_alone and row.trigger in self._last_wait:
            place = self._last_wait[row.trigger]
            found[place:place] = self._operation(operation, row)
            return
        found += self._operation(operation, row)
        if row.trigger in _ALL_UNITS:
            found += self._repeated(operation, row)

    def _operation(self, operation: Operation, row: Row) -> Iterator[Instruction]:
        name, num_bytes, overhead, rings = operation.subject, operation.num_bytes, self.overhead, self.rings
        kind = operation.kind
        match kind:
            case Kind.GATHER:
                yield from self._gather(operation, after_step=row.trigger is Trigger.AFTER_STEP)
            case Kind.WAIT_GATHER if row.trigger is Trigger.AFTER_FORWARD:
                # fully_shard frees the buffer that it has copied out.
                pass
            case Kind.WAIT_GATHER:
                yield Instruction(WAIT, f"gather {name}", 0, overhead.wait)
                if overhead.copies_out:
                    yield self._copy(f"copy {name}", 2 * self.sizes[name].compute_bytes)
            case Kind.FREE:
                yield Instruction(CALL, "free", 0, overhead.free)
            case Kind.TAKE_GRADS:
                yield self._take(name)
            case Kind.REDUCE:
                if not operation.is_local:
                    yield self._reduce(name, num_bytes, units=self.buckets[name].units)
                    if self.overlap == "none":
                        yield Instruction(WAIT, f"reduce {name}")
            case Kind.WAIT_REDUCE:
                yield from self._wait_reduce(self.buckets[name])
            case Kind.REDUCE_SLICE:
                yield self._reduce_slice(self.buckets[name])
            case Kind.WAIT_SLICE:
                yield Instruction(WAIT, f"reduce slice {name}", 0, overhead.wait)
                yield from self._deliver(self.buckets[name])
            case Kind.GATHER_SLICE:
                yield from self._gather_slice(operation)
            case Kind.WAIT_GATHER_SLICE:
                yield Instruction(WAIT, f"gather slice {name}", 0, overhead.wait)
            case Kind.REDUCE_FLAGS:
                if not operation.is_local:
                    yield self._send("reduce flags", rings.world, rings.world.all_reduce_seconds(num_bytes))
            case Kind.BROADCAST:
                if not operation.is_local:
                    yield from self._broadcast(num_bytes)
            case Kind.GATHER_SCALES:
                yield from self._gather_scales(operation)
            case Kind.TO_OWNERS | Kind.FROM_OWNERS:
                yield from self._move_owned(f"gather {kind.value} {name}", operation)
            case Kind.UPDATE:
                yield from self._update()
            case Kind.FORWARD:
                # The model's computation is in its trace (pieces.py).
                self._called.add(name)
                yield from self.host.save_before(name)
            case Kind.BACKWARD:
                yield from self.host.bring_saved(name)
            case _:
                assert_never(kind)

    def _repeated(self, operation: Operation, row: Row) -> Iterator[Instruction]:
        """Yield the same operation for the units that its unit stands for."""
        bucket = self.buckets.get(operation.subject)
        unit = operation.subject if bucket is None else bucket.units[0]
        others = self.job.weight(unit) - 1
        sent: set[str] = set()
        for one in self._operation(operation, row) if others else ():
            if one.what == COMPUTE:
                launch, kernel, _ = self.works[one.number - self.num_pieces]
                yield self._work(one.name, others * launch, others * kernel)
            elif one.what == SEND:
                sent.add(one.name)
                yield one._replace(
                    name=f"{one.name} and others", launch=others * one.launch, seconds=others * one.seconds
                )
            elif one.what == WAIT and one.name in sent:
                yield one._replace(name=f"{one.name} and others", launch=others * one.launch)
            else:
                yield Instruction(CALL, one.name, 0, others * one.launch)

    def _gather(self, operation: Operation, *, after_step: bool) -> Iterator[Instruction]:
        """Copy or load this rank's slice, and send it."""
        name, ring, num_bytes = operation.subject, self.rings.shard, operation.num_bytes
        if name in self.host.units:
            yield self.host.load(f"gather {name}", num_bytes / self.job.num_slices)
        else:
            # An update changes only trainable parameters.
            elements = self.sizes[name].trainable if after_step else self.sizes[name].elements
            copied = self._slice_copied(name, num_bytes, elements=elements)
            yield self._copy(f"copy {name}", copied, launch=self.overhead.gather / 2)
        if not operation.is_local:
            yield self._send(f"gather {name}", ring, ring.gather_seconds(num_bytes))
            if self.overlap == "none" or (self.overlap == "gradients" and after_step):
                yield Instruction(WAIT, f"gather {name}")

    def _gather_slice(self, operation: Operation) -> Iterator[Instruction]:
        """Cast this rank's part of its slice, and send that over the replicate axis."""
        name, ring, sizes = operation.subject, self.rings.replicate, self.sizes[operation.subject]
        cast = (operation.num_bytes + MASTER_BYTES * sizes.trainable / self.job.num_slices) / ring.num_ranks
        yield self._copy(f"copy slice {name}", cast if sizes.is_cast else 0.0, launch=self.overhead.gather / 2)
        yield self._send(f"gather slice {name}", ring, ring.gather_seconds(operation.num_bytes))

    def _gather_scales(self, operation: Operation) -> Iterator[Instruction]:
        """Read this rank's masters, and send as many numbers as there are weights."""
        ring = self.rings.shard
        masters = sum(MASTER_BYTES * size.trainable for size in self.sizes.values()) // ring.num_ranks
        yield self._copy("scales", masters)
        if not operation.is_local:
            yield self._send("gather scales", ring, ring.gather_seconds(ring.num_ranks * operation.num_bytes))
            yield Instruction(WAIT, "gather scales", 0, self.overhead.wait)

    def _broadcast(self, num_bytes: int) -> Iterator[Instruction]:
        num_buffers = sum(len(unit.buffers) for unit in self.job.spec.units)
        yield Instruction(CALL, "buffers", 0, num_buffers * self.overhead.buffer)
        world = self.rings.world
        yield self._send("reduce buffers", world, world.broadcast_seconds(num_bytes))
        yield Instruction(WAIT, "reduce buffers", 0, self.overhead.wait)

    def _move_owned(self, name: str, operation: Operation) -> Iterator[Instruction]:
        """Copy into one piece per owner, send, and copy into the unsharded matrix or back into slices."""
        ring, copied = self.rings.shard, 4 * operation.num_bytes / self.job.num_slices
        yield self._copy(name.removeprefix("gather "), copied, launch=self.overhead.gather)
        if not operation.is_local:
            yield self._send(name, ring, ring.all_to_all_seconds(operation.num_bytes))
            yield Instruction(WAIT, name, 0, self.overhead.wait)

    def _send(self, name: str, ring: Ring, seconds: float) -> Instruction:
        launch = self.overhead.gather / 2 if name.startswith("gather") else self.overhead.reduce
        return Instruction(SEND, name, int(ring.num_nodes > 1), launch, seconds)

    def _copy(self, name: str, num_bytes: float, *, launch: float = 0.0) -> Instruction:
        """Copy memory; `num_bytes` counts reads and writes."""
        kernel = copy_seconds(num_bytes, device=self.cluster.device) if num_bytes else 0.0
        return self._work(name, launch, kernel)

    def _work(self, name: str, launch: float, kernel: float) -> Instruction:
        if self.cluster.device.name == "cpu":
            # The CPU issues and computes.
            launch, kernel = launch + kernel, 0.0
        self.works.append(WorkSeconds(launch, kernel, launch + kernel))
        return Instruction(COMPUTE, name, self.num_pieces + len(self.works) - 1)

    def _slice_copied(self, name: str, num_bytes: int, *, elements: int) -> float:
        """Return the bytes of copying a rank's slice from the master into the buffer, unless they are the same."""
        placement = self.job.placements[name]
        if not placement.params.is_sharded and not self.sizes[name].is_cast:
            return 0.0
        if placement.optim.is_sharded_across:
            # The slice has the dtype of the buffer.
            return 2 * num_bytes / self.job.num_slices
        return (num_bytes + MASTER_BYTES * elements) / self.job.num_slices

    def _take(self, name: str) -> Instruction:
        """Copy autograd's gradients, or a piece of them, into the buffer that is reduced."""
        bucket = self.buckets.get(name)
        unit, num_pieces = (name, 1) if bucket is None else (bucket.units[0], bucket.num_pieces)
        sizes = self.sizes[unit]
        # Under autocast, parameters and their gradients are fp32; autocast's copies are in the trace.
        made = MASTER_BYTES * sizes.trainable if self.job.engine.autocasts else sizes.grad_bytes
        divided = 2 * sizes.reduce_bytes if self.overhead.divides else 0
        copied = (made + sizes.reduce_bytes + divided) // num_pieces
        return self._copy(f"take {name}", copied, launch=self.overhead.take)

    def _reduce(self, name: str, num_bytes: int, *, units: Sequence[str]) -> Instruction:
        rings = self.rings
        if not self.job.placements[units[0]].grads.is_sharded:
            return self._send(f"reduce {name}", rings.world, rings.world.all_reduce_seconds(num_bytes))
        seconds = rings.shard.gather_seconds(num_bytes)
        if self.cluster.device.name == "cpu":
            # Gloo's reduce-scatter is slower than its all-reduce, which is used instead (comm/groups/collectives.py).
            seconds = rings.shard.all_reduce_seconds(num_bytes)
        return self._send(f"reduce {name}", rings.shard, seconds)

    def _reduce_slice(self, bucket: Bucket) -> Instruction:
        """Sum a slice over the replicate axis of the mesh, or only this rank's part of it."""
        ring, num_bytes = self.rings.replicate, self._reduced_bytes(bucket) / self.job.num_slices
        scatters = self.job.placements[bucket.units[0]].grads.is_sharded_across and self.cluster.device.name != "cpu"
        seconds = ring.gather_seconds(num_bytes) if scatters else ring.all_reduce_seconds(num_bytes)
        return self._send(f"reduce slice {bucket.name}", ring, seconds)

    def _wait_reduce(self, bucket: Bucket) -> Iterator[Instruction]:
        """Wait, and average the gradients; slices that cross the replicate axis are averaged later (WAIT_SLICE)."""
        yield Instruction(WAIT, f"reduce {bucket.name}", 0, self.overhead.wait)
        if not self.job.placements[bucket.units[0]].grads.is_sharded or self.rings.replicate.num_ranks == 1:
            yield from self._deliver(bucket)
        elif self.overhead.copies_slices:
            yield self._copy(f"copy slice {bucket.name}", 2 * self._reduced_bytes(bucket) // self.job.num_slices)

    def _deliver(self, bucket: Bucket) -> Iterator[Instruction]:
        """Average the gradients of this rank; with the last piece of a unit they are complete."""
        num_bytes, units = self._reduced_bytes(bucket), bucket.units
        num_bytes //= self.job.mesh.num_parts(self.job.placements[units[0]].grads.axes)
        if not self.overhead.divides:
            yield self._copy(f"average {bucket.name}", 2 * num_bytes, launch=self.overhead.deliver)
        if not bucket.is_last:
            return
        if self.host.units >= set(units) and self.job.plan.offload_update == "host":
            yield self.host.fetch(bucket.name, bucket.num_pieces * num_bytes)
        if is_in_backward(self.job.plan, self.job.placements[units[0]]):
            yield from self._update_unit(units[0])

    def _reduced_bytes(self, bucket: Bucket) -> int:
        return sum(self.sizes[unit].reduce_bytes for unit in bucket.units) // bucket.num_pieces

    def _update(self) -> Iterator[Instruction]:
        job, num_elements, num_tensors, refreshed, clipped = self.job, 0, 0, 0, 0
        for unit in job.short.spec.units:
            sizes, weight = self.sizes[unit.name], job.weight(unit.name)
            in_matrices, num_matrices = matrix_sizes(unit, optimizer=job.optimizer)
            elements, tensors, grads = sizes.trainable - in_matrices, sizes.tensors - num_matrices, sizes.trainable
            num_parts = job.mesh.num_parts(job.placements[unit.name].optim.axes)
            if job.placements[unit.name].optim.is_sharded:
                elements, tensors = elements // num_parts, min(tensors, tensors // num_parts + 1)
                grads //= num_parts
            elif self.overhead.refreshes and sizes.is_cast:
                # The parameters are cast to the compute dtype again.
                refreshed += weight * (sizes.grad_bytes + MASTER_BYTES * sizes.trainable)
            num_elements, num_tensors = num_elements + weight * elements, num_tensors + weight * tensors
            clipped += weight * grads
            in_backward = is_in_backward(job.plan, job.placements[unit.name])
            if unit.name in self.host.units or in_backward:
                num_elements, num_tensors = num_elements - weight * elements, num_tensors - weight * tensors
        if self.clips:
            yield from self._clip(MASTER_BYTES * clipped)
        launch, kernel = self._update_seconds(num_elements, num_tensors)
        yield self._work("update", launch + self.overhead.step, kernel)
        if job.optimizer.matrices is not None:
            yield self._work("update matrices", *self._matrices_seconds())
        if refreshed:
            yield self._copy("refresh", refreshed)
        yield from self.host.update()

    def _update_unit(self, name: str) -> Iterator[Instruction]:
        """Update a unit inside backward."""
        if name in self.host.units:
            yield from self.host.update_in_backward(name)
            return
        sizes, slices = self.sizes[name], self.job.mesh.num_parts(self.job.placements[name].optim.axes)
        tensors = min(sizes.tensors, sizes.tensors // slices + 1)
        launch, kernel = self._update_seconds(sizes.trainable // slices, tensors)
        yield self._work(f"update {name}", launch + self.overhead.step, kernel)

    def _update_seconds(self, num_elements: int, num_tensors: int) -> tuple[float, float]:
        return update_seconds(
            num_elements=num_elements,
            num_tensors=num_tensors,
            # Muon steps everything but matrices with AdamW.
            optimizer=self.optimizer.replace("muon", "adamw"),
            device=self.cluster.device,
        )

    def _matrices_seconds(self) -> tuple[float, float]:
        """Return (launch, kernel) of the matrices on the slowest rank, for which all others wait."""
        ranks = (self.job.matrices.on(rank) for rank in range(self.job.num_slices))
        return max((muon_seconds(matrices, device=self.cluster.device) for matrices in ranks), key=sum)

    def _clip(self, num_bytes: int) -> Iterator[Instruction]:
        """Compute the norm of the rank's gradients, sum it over the axes that shard, and scale the gradients."""
        yield self._copy("norm", num_bytes)
        axes = {axis for placement in self.job.placements.values() for axis in placement.optim.axes}
        for axis, ring in (("replicate", self.rings.replicate), ("shard", self.rings.shard)):
            if axis in axes:
                yield self._send("reduce norm", ring, ring.all_reduce_seconds(_NORM_BYTES))
                yield Instruction(WAIT, "reduce norm", 0, self.overhead.wait)
        yield self._copy("clip", 2 * num_bytes)
