"""What a step copies to and from host memory, as instructions for the queues."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.hardware import Cluster
from shardwise.plan.placement import SHARDED
from shardwise.planner.job import Job
from shardwise.planner.overhead import Overhead
from shardwise.planner.sizes import MASTER_BYTES, UnitSizes
from shardwise.planner.time.host_link import host_bytes_per_s, host_memory_speed
from shardwise.planner.time.queues import CALL, LOAD, STREAM, SYNC, WAIT, Instruction
from shardwise.program.chunks import GRADS_IN_FLIGHT


@dataclass(kw_only=True)
class HostTraffic:
    """The traffic of one job: slices that are gathered, updates, gradients, and what backward needs."""

    job: Job
    cluster: Cluster
    sizes: Mapping[str, UnitSizes]
    overhead: Overhead
    # Units whose states are updated in backward, and that nothing has waited for.
    _streaming: list[str] = field(default_factory=list)

    @cached_property
    def units(self) -> frozenset[str]:
        """The units whose states live in host memory."""
        plan, places = self.job.plan, self.job.placements
        return frozenset(name for name, one in places.items() if one.grads is SHARDED and plan.has_states_on_host(name))

    def load(self, name: str, num_bytes: float) -> Instruction:
        return Instruction(LOAD, name, 0, self.overhead.gather, self.copy_seconds(num_bytes))

    def fetch(self, name: str, num_bytes: float) -> Instruction:
        """Copy gradients to the CPU, which updates with them."""
        return Instruction(STREAM, f"fetch {name}", 0, 0.0, self.copy_seconds(num_bytes))

    def copy_seconds(self, num_bytes: float, *, both_ways: bool = False) -> float:
        return num_bytes / host_bytes_per_s(self.cluster, both_ways=both_ways)

    def update(self) -> Iterator[Instruction]:
        """Pass states through the device, unit by unit in the order of their use; or let the CPU update them all."""
        job = self.job
        in_order = [name for name in dict.fromkeys((*job.short.spec.call_order, *self.sizes)) if name in self.units]
        if in_order and job.plan.offload_update == "host":
            yield Instruction(SYNC, "gradients")
            ranks = min(self.cluster.num_ranks, self.cluster.devices_per_node)
            elements = sum(self.sizes[name].trainable for name in in_order) / job.num_slices
            yield Instruction(
                CALL, "update", 0, ranks * elements / host_memory_speed(self.cluster.device).updates_per_s
            )
        elif not job.plan.updates_in_backward:
            yield from (self._streamed(name) for name in in_order)
            if job.plan.captures:
                # The graph of the update ends with them.
                yield from (Instruction(WAIT, f"update {name}") for name in in_order)

    def update_in_backward(self, unit: str) -> Iterator[Instruction]:
        """Update a unit inside backward; a few are on their way at a time."""
        yield self._streamed(unit)
        self._streaming.append(unit)
        if len(self._streaming) > GRADS_IN_FLIGHT:
            yield Instruction(WAIT, f"update {self._streaming.pop(0)}")

    def _streamed(self, name: str) -> Instruction:
        """Pass a unit's states through the device, in both directions at once."""
        sizes, job = self.sizes[name], self.job
        # The parameters in the compute dtype go out as well.
        cast = sizes.compute_bytes / sizes.elements if sizes.is_cast else 0
        each = MASTER_BYTES * (1 + job.optimizer.num_moments) + cast
        seconds = self.copy_seconds(sizes.trainable / job.num_slices * each, both_ways=True)
        return Instruction(STREAM, f"update {name}", 0, self.overhead.stream * sizes.tensors, seconds)

    # What backward needs. The seconds depend on the batch, and are the last works of a step (step_time.py).

    def save_before(self, unit: str) -> Iterator[Instruction]:
        """When a unit's forward begins, copy out what the previous one has saved; the one before that must be out."""
        place = self._place_of_saved(unit)
        if place is not None and place >= 1:
            yield self._of_saved(STREAM, "save", place - 1)
        if place is not None and place >= 2:
            yield Instruction(WAIT, f"save {self._saving[place - 2]}")

    def bring_saved(self, unit: str) -> Iterator[Instruction]:
        """When a unit's backward begins, copy in what the one before it has saved, and wait for its own."""
        place = self._place_of_saved(unit)
        if place is not None and place >= 1:
            yield self._of_saved(LOAD, "saved", place - 1)
        if place is not None and place < len(self._saving):
            yield Instruction(WAIT, f"saved {unit}")

    def _of_saved(self, what: int, word: str, place: int) -> Instruction:
        number = place - len(self._saving)
        return Instruction(what, f"{word} {self._saving[place]}", number, self.overhead.gather)

    @cached_property
    def _saving(self) -> list[str]:
        return list(self.job.saved_on_host)

    def _place_of_saved(self, unit: str) -> int | None:
        """Return the place of a unit among those that save in host memory; the last one keeps its own."""
        if not self._saving or unit not in self.job.saved_by_units:
            return None
        return self._saving.index(unit) if unit in self._saving else len(self._saving)
