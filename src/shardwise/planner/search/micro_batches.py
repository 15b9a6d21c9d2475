"""What a search may try for a whole job: micro-batches with their passes, and meshes with what is sharded over them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2

from shardwise.base.errors import InvalidPlan
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.plan.placement import ACROSS, STRATEGIES, Mesh

MOST_BATCH = 2**10
"""The largest micro-batch of any search: a tiny model is not trained with the thousands of samples that fit."""
# A free batch is compared with this many smaller and larger ones: some sizes suit kernels better than others.
_NEAR = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """A fixed `micro_batch`; or any divisor of `samples`, those of a rank and step; or a free one.

    `passes` per step, unless they follow from `samples`.
    """

    micro_batch: int | None = None
    samples: int | None = None
    passes: int = 1

    @property
    def is_free(self) -> bool:
        return self.micro_batch is None and self.samples is None

    def accumulate(self, batch: int) -> int:
        return self.passes if self.samples is None else self.samples // batch

    def allowed(self) -> list[int]:
        """Return all of them; if free, only 1."""
        if self.samples is None:
            return [self.micro_batch or 1]
        return [batch for batch in range(1, self.samples + 1) if self.samples % batch == 0]

    def near(self, batch: int) -> list[int]:
        """Return other batches close to one."""
        if self.is_free:
            close = range(max(1, batch - _NEAR), min(MOST_BATCH, batch + _NEAR) + 1)
            return [other for other in close if other != batch]
        allowed = self.allowed()
        at = allowed.index(batch)
        return [*allowed[max(at - 1, 0) : at], *allowed[at + 1 : at + 2]]


def micro_batches_of(plan: Plan, *, global_batch: int | None, num_ranks: int) -> MicroBatches:
    """Return the micro-batches that a plan and a global batch allow; without one the plan sets the passes."""
    if global_batch is None:
        return MicroBatches(micro_batch=plan.micro_batch, passes=plan.accumulate)
    samples, left = divmod(global_batch, num_ranks)
    if left or samples < 1:
        raise InvalidPlan(
            f"a global batch of {global_batch} on {num_ranks} ranks: it must be a multiple of {num_ranks}"
        )
    given, name = (plan.micro_batch, "micro_batch") if plan.micro_batch is not None else (plan.accumulate, "accumulate")
    if samples % given:
        raise InvalidPlan(
            f"a global batch of {global_batch} on {num_ranks} ranks is {samples} samples per rank and step, which "
            f"{name} = {given} does not divide"
        )
    if plan.micro_batch is None and plan.accumulate == 1:
        return MicroBatches(samples=samples)
    batch = given if plan.micro_batch is not None else samples // given
    return MicroBatches(micro_batch=batch, passes=samples // batch)


def largest_fitting(fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits, if all smaller ones do; at least 1."""
    low, high = 1, 2
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def meshes(strategy: str, *, plan: Plan, cluster: Cluster) -> list[Mesh]:
    """Return the plan's mesh; else all ranks on the shard axis and, on several nodes, shards of one node and of √nodes.

    A strategy that shards nothing is the same on every mesh.
    """
    if plan.mesh is not None:
        return [plan.mesh]
    num_ranks, per_node = cluster.num_ranks, cluster.devices_per_node
    flat = Mesh(shard=num_ranks)
    if not STRATEGIES[strategy].optim.is_sharded:
        return [flat]
    nodes = sorted({1, 2 ** round(log2(cluster.num_nodes) / 2)}, reverse=True)
    shards = [per_node * count for count in nodes if count < cluster.num_nodes and cluster.num_nodes % count == 0]
    return [flat, *(Mesh(replicate=num_ranks // shard, shard=shard) for shard in shards)]


def across_on(mesh: Mesh, *, rows: Iterable[str], base: Plan, may_cross: bool) -> str:
    """Return the strategy of `base` across a mesh, or the one that shards the most; none where nothing is sharded."""
    if mesh.replicate == 1 or not any(STRATEGIES[row].params.is_sharded for row in rows):
        return ACROSS[0]
    can = may_cross and LIMITS[base.engine].has("across") and not base.owned
    return base.across if base.is_sharded_across or not can else ACROSS[-1]
