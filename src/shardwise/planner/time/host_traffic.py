"""What a step copies to and from host memory, as instructions for the queues."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.hardware import Cluster
from shardwise.planner.engine_model import Overhead
from shardwise.planner.job import Job
from shardwise.planner.time.host_link import host_bytes_per_s, host_memory_speed
from shardwise.planner.time.queues import CALL, LOAD, STREAM, SYNC, WAIT, Instruction
from shardwise.planner.whole_matrices import MASTER_BYTES, UnitSizes
from shardwise.program.rules.context import MOST_GRADS, has_states_on_host, overdue, saved_before


@dataclass(kw_only=True)
class HostTraffic:
    """The traffic of one job: slices that are gathered, updates, gradients, and what backward needs."""

    job: Job
    cluster: Cluster
    sizes: Mapping[str, UnitSizes]
    overhead: Overhead
    # Units whose states are updated in backward, and that nothing has waited for.
    _streaming: deque[str] = field(default_factory=deque)

    @cached_property
    def units(self) -> frozenset[str]:
        """The units whose states live in host memory."""
        plan, places = self.job.plan, self.job.placements
        return frozenset(name for name, one in places.items() if has_states_on_host(name, plan=plan, placement=one))

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

    def update_in_backward(self, unit: str) -> Iterator[Instruction]:
        """Update a unit inside backward; a few are on their way at a time."""
        yield self._streamed(unit)
        self._streaming.append(unit)
        yield from (Instruction(WAIT, f"update {name}") for name in overdue(self._streaming, most=MOST_GRADS))

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
        before = self._saved_before(unit)
        if before is None:
            return
        yield self._of_saved(STREAM, "save", before)
        earlier = self._saved_before(before)
        if earlier is not None:
            yield Instruction(WAIT, f"save {earlier}")

    def bring_saved(self, unit: str) -> Iterator[Instruction]:
        """When a unit's backward begins, copy in what the one before it has saved, and wait for its own."""
        before = self._saved_before(unit)
        if before is not None:
            yield self._of_saved(LOAD, "saved", before)
        if unit in self.job.saved_on_host:
            yield Instruction(WAIT, f"saved {unit}")

    def _of_saved(self, what: int, word: str, unit: str) -> Instruction:
        number = self._saving.index(unit) - len(self.job.saved_on_host)
        return Instruction(what, f"{word} {unit}", number, self.overhead.gather)

    @cached_property
    def _saving(self) -> list[str]:
        return list(self.job.saved_by_units)

    def _saved_before(self, unit: str) -> str | None:
        return saved_before(unit, saving=self._saving)
