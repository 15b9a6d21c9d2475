"""Placements: which state of a unit is replicated and which is sharded. Strategies are placements with a name.

Step 1 of 5: vocabulary → spec → step program → planner and engine → proof by measurement.
Code asks a placement (`if placement.params is SHARDED`), never the strategy's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.files.form import Form, one_of
from shardwise.files.keys import documented, key, object_of


class Where(Enum):
    """State of a kind is whole on every rank (replicated), or each rank of the shard axis holds a slice (sharded)."""

    REPLICATED = "replicated"
    SHARDED = "sharded"

    def __repr__(self) -> str:
        return self.name


REPLICATED = Where.REPLICATED
SHARDED = Where.SHARDED

# A file spells it; Python code gives the member itself.
_WHERE = one_of([where.value for where in Where]).then(lambda value, path: Where(value))


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One unit's parameters, gradients and optimizer state, each replicated or sharded.

    Invariant: sharded params ⇒ sharded grads ⇒ sharded optim. A rank that holds a slice of the
    parameters can apply only that slice of the gradients, and needs only that slice of the state.
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
                raise InvalidPlan(f"{name} = {getattr(self, name)!r}: must be Where.REPLICATED or Where.SHARDED")
        if not isinstance(self.reshard_after_forward, bool):
            raise InvalidPlan(f"reshard_after_forward = {self.reshard_after_forward!r}: must be true or false")
        if self.params is SHARDED and self.grads is not SHARDED:
            raise InvalidPlan("params = 'sharded' with grads = 'replicated': sharded params need sharded grads")
        if self.grads is SHARDED and self.optim is not SHARDED:
            raise InvalidPlan("grads = 'sharded' with optim = 'replicated': sharded grads need sharded optim")
        if self.reshard_after_forward and self.params is not SHARDED:
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
"""The strategies, simplest first. A strategy is its row and nothing else; every possible placement is a row."""

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
    read=lambda value, path: value if isinstance(value, str) else strategy_of(_PLACEMENT.read(value, path)),
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


def placement_of(strategy: str) -> Placement:
    """Return the placement that a strategy gives to every unit."""
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise UnknownName.of("strategy", strategy, known=STRATEGIES) from None


def strategy_of(placement: Placement) -> str:
    """Return the name of a placement's row."""
    return next(name for name, row in STRATEGIES.items() if row == placement)
