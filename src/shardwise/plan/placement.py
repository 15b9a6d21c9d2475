"""Placements: which state of a unit is replicated and which is sharded. Strategies are placements with a name.

Step 1 of 5: vocabulary → spec → step program → planner and engine → proof by measurement.
Code asks a placement (`if placement.params.is_sharded`), never the strategy's name.

The ranks as a grid with two axes, `replicate` × `shard`.

State is sharded along `shard` and repeated along `replicate`. Hybrid sharding is a mesh whose
replicate axis is longer than 1. It is not a strategy, and works with every strategy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from math import prod
from types import MappingProxyType

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.base.files.form import Form, one_of
from shardwise.base.files.keys import check_keys, documented, key, object_of


class Where(Enum):
    """The axes of the mesh over which state of a kind is sharded: none, the shard axis, or both.

    is_sharded          each rank of the shard axis holds a slice of it
    is_sharded_across   each rank of the replicate axis holds a part of that slice
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    SHARDED_TWICE = "sharded over all ranks"

    # Attributes and no properties: every gather and every reduce of a step asks.
    def __init__(self, words: str) -> None:
        self.is_sharded_across = words == "sharded over all ranks"
        self.is_sharded = self.is_sharded_across or words == "sharded"
        axes = {"shard": self.is_sharded, "replicate": self.is_sharded_across}
        self.axes = frozenset(axis for axis, is_cut in axes.items() if is_cut)

    def __repr__(self) -> str:
        return self.name


REPLICATED = Where.REPLICATED
SHARDED = Where.SHARDED
SHARDED_TWICE = Where.SHARDED_TWICE

# A file spells it; Python code gives the member itself.
_WHERE = one_of([where.value for where in Where]).then(lambda value, path: Where(value))


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One unit's parameters, gradients and optimizer state, each sharded over no axis of the mesh, one, or both.

    Invariant: axes(params) ⊆ axes(grads) ⊆ axes(optim). A rank that holds a slice of the parameters can apply only
    that slice of the gradients, and needs only that slice of the state. Parameters are whole along `replicate`, so that
    gathers stay inside a shard group.
    """

    params: Where = key(..., "parameters", form=_WHERE)
    grads: Where = key(..., "reduced gradients", form=_WHERE)
    optim: Where = key(..., "optimizer state, with the fp32 master", form=_WHERE)
    reshard_after_forward: bool = key(
        False, "gathered parameters are freed after forward and gathered again for backward; only for sharded params"
    )

    def __post_init__(self) -> None:
        for name in ("params", "grads", "optim"):
            if not isinstance(getattr(self, name), Where):
                raise InvalidPlan(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(map(str, Where))}")
        if not isinstance(self.reshard_after_forward, bool):
            raise InvalidPlan(f"reshard_after_forward = {self.reshard_after_forward!r}: must be true or false")
        for inner, outer in (("params", "grads"), ("grads", "optim")):
            held, kept = getattr(self, inner), getattr(self, outer)
            if not held.axes <= kept.axes:
                raise InvalidPlan(
                    f"{inner} = {held.value!r} with {outer} = {kept.value!r}: {outer} must be sharded over all axes of "
                    f"the mesh over which {inner} are"
                )
        if self.params.is_sharded_across:
            raise InvalidPlan(
                "params = 'sharded over all ranks': use a mesh of one axis, whose shard axis has all ranks"
            )
        if self.optim.is_sharded_across and not self.params.is_sharded:
            raise InvalidPlan(
                f"optim = {self.optim.value!r} with params = 'replicated': use a mesh of one axis, whose shard axis "
                "has all ranks"
            )
        if self.reshard_after_forward and not self.params.is_sharded:
            raise InvalidPlan("reshard_after_forward = true with params = 'replicated': only sharded params reshard")


STRATEGIES: Mapping[str, Placement] = MappingProxyType(
    {
        "ddp": Placement(params=REPLICATED, grads=REPLICATED, optim=REPLICATED),
        "zero1": Placement(params=REPLICATED, grads=REPLICATED, optim=SHARDED),
        "zero2": Placement(params=REPLICATED, grads=SHARDED, optim=SHARDED),
        "shard_grad_op": Placement(params=SHARDED, grads=SHARDED, optim=SHARDED),
        "fsdp": Placement(params=SHARDED, grads=SHARDED, optim=SHARDED, reshard_after_forward=True),
    }
)
"""The strategies, simplest first. A strategy is its row and nothing else: each placement over the shard axis is one."""

ACROSS: tuple[str, ...] = tuple(name for name, row in STRATEGIES.items() if not row.params.is_sharded)
"""The strategies over the replicate axis of a mesh, along which parameters are whole; the first one shards nothing."""

AUTO = "auto"
"""In place of a strategy: the planner's solver chooses the row of each unit (planner/search/auto.py)."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {"no_shard": "ddp", "full_shard": "fsdp", "zero3": "fsdp", "hybrid_shard": "fsdp"}
)
"""Another library's name of a strategy → its row. Hybrid sharding is fsdp on a mesh that replicates as well."""


def _spelling(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _own_name(name: str) -> str:
    spelled = _spelling(name)
    return ALIASES.get(spelled, spelled if spelled in STRATEGIES else name)


_PLACEMENT = object_of(Placement)
STRATEGY = Form(
    words=f"one of {', '.join((*STRATEGIES, AUTO))}",
    fits=lambda value: isinstance(value, str) and _own_name(value) in (*STRATEGIES, AUTO),
)
"""The form of a plan's strategy."""
OVERRIDE = Form(
    words=f"one of {', '.join(STRATEGIES)}, or a placement",
    fits=lambda value: _PLACEMENT.fits(value) or (isinstance(value, str) and _own_name(value) in STRATEGIES),
    read=lambda value, path: value if isinstance(value, str) else _row_of(_PLACEMENT.read(value, path), path=path),
)
"""The form of a unit's own strategy; a placement becomes the name of its row."""


def resolve_strategy(name: str, *, replicate: int = 1) -> str:
    """Return our name of a strategy, given another library's (`FULL_SHARD`); return any other name unchanged.

    replicate    length of the mesh's replicate axis. `hybrid_shard` needs more than 1.
    """
    if replicate == 1 and _spelling(name) == "hybrid_shard":
        raise InvalidPlan(
            "strategy = 'hybrid_shard' is fsdp on a mesh of nodes × ranks per node: give the mesh too, such as "
            "Mesh(replicate=2, shard=8) in a plan or --mesh 2x8"
        )
    return _own_name(name)


@cache
def placement_of(strategy: str, *, across: str = ACROSS[0]) -> Placement:
    """Return the placement that a strategy gives to every unit, with another one across the replicate axis.

    Only sharded params leave it a choice: where they are replicated, one strategy over all ranks says the same.
    """
    try:
        row, other = STRATEGIES[strategy], STRATEGIES[across]
    except KeyError as unknown:
        raise UnknownName.of("strategy", unknown.args[0], known=STRATEGIES) from None
    if not row.params.is_sharded:
        return row
    grads, optim = (
        SHARDED_TWICE if over.is_sharded else inside
        for inside, over in ((row.grads, other.grads), (row.optim, other.optim))
    )
    return replace(row, grads=grads, optim=optim)


def strategy_of(placement: Placement) -> str:
    """Return the name of a placement's row over the shard axis."""
    return next(name for name in STRATEGIES for across in ACROSS if placement_of(name, across=across) == placement)


def _row_of(placement: Placement, *, path: str) -> str:
    if placement.optim.is_sharded_across:
        raise InvalidPlan(f"{path}: 'sharded over all ranks' is for the whole plan: set across = 'zero1' or 'zero2'")
    return strategy_of(placement)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`replicate` groups of `shard` ranks each; rank = replicate_index · shard + shard_index.

    Ranks of one shard group are consecutive. Where ranks are numbered node by node, a shard group is a node
    or a part of one, so the heaviest traffic stays inside a node.
    """

    replicate: int = key(1, "shard groups, which hold the same slices", least=1)
    shard: int = key(1, "ranks of a shard group, which hold one slice each", least=1)

    def __post_init__(self) -> None:
        check_keys(self, path="mesh", error=InvalidPlan)

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def num_parts(self, axes: Iterable[str]) -> int:
        """Return the number of parts of what is sharded over these axes, `shard` and `replicate`."""
        return prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replicate index, shard index) of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidPlan(f"rank {rank} is outside a mesh of {self} = {self.num_ranks} ranks")
        return divmod(rank, self.shard)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the slices of the same state, this rank included."""
        first = self.coordinates(rank)[0] * self.shard
        return tuple(range(first, first + self.shard))

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same slice as this rank, this rank included."""
        return tuple(range(self.coordinates(rank)[1], self.num_ranks, self.shard))

    def check_ranks(self, num_ranks: int) -> None:
        """Raise an error if the job has another number of ranks than the mesh."""
        if num_ranks != self.num_ranks:
            raise InvalidPlan(
                f"mesh {self} is {self.num_ranks} ranks, but the job has {num_ranks}: leave the mesh out of the plan "
                f"(shardwise train … --set plan.mesh=), or set mesh.replicate × mesh.shard = {num_ranks}"
            )

    def __str__(self) -> str:
        return f"{self.replicate}×{self.shard}"
