"""What is replicated, and what is sharded: the answer for one unit, and the named answers.

Step 1 of 5: vocabulary → spec → step program → planner and engine → proof by measurement.
Code asks a placement (`if placement.params is SHARDED`), never the strategy's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from shardwise.errors import InvalidPlan, UnknownName


class Where(Enum):
    """Where a kind of state lives: whole on every rank, or one slice per rank of the shard axis."""

    REPLICATED = "replicated"
    SHARDED = "sharded"

    def __repr__(self) -> str:
        return self.name


REPLICATED = Where.REPLICATED
SHARDED = Where.SHARDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one unit's parameters, gradients and optimizer state live.

    Invariant: sharded params ⇒ sharded grads ⇒ sharded optim. A rank that holds a slice of the
    parameters can apply only that slice of the gradients, and needs only that slice of the state.

    `reshard_after_forward`: gathered parameters are freed after forward and gathered again for
    backward. It says nothing where parameters are replicated, so there it must be False.
    """

    params: Where
    grads: Where
    optim: Where
    reshard_after_forward: bool = False

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
"""The strategies, simplest first. A row is all that a strategy is; every possible placement is a row."""

AUTO = "auto"
"""In place of a strategy: the planner's solver is to give each unit its row (planner/search/auto.py)."""


ALIASES: Mapping[str, str] = MappingProxyType(
    {"no_shard": "ddp", "full_shard": "fsdp", "zero3": "fsdp", "hybrid_shard": "fsdp"}
)
"""What other libraries call a strategy → its row. Hybrid sharding is fsdp on a mesh that replicates as well."""


def resolve_strategy(name: str, *, replicate: int = 1) -> str:
    """A strategy's own name, for one that other libraries give it (`FULL_SHARD`); any other name as it is.

    replicate    of the mesh. `hybrid_shard` needs one that is longer than 1.
    """
    spelled = name.strip().lower().replace("-", "_")
    if spelled == "hybrid_shard" and replicate == 1:
        raise InvalidPlan(
            "strategy = 'hybrid_shard' is fsdp on a mesh of nodes × ranks per node: give the mesh too, such as "
            "Mesh(replicate=2, shard=8) in a plan or --mesh 2x8"
        )
    return ALIASES.get(spelled, spelled if spelled in STRATEGIES else name)


def placement_of(strategy: str) -> Placement:
    """The placement that a strategy gives to every unit."""
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise UnknownName.of("strategy", strategy, known=STRATEGIES) from None


def strategy_of(placement: Placement) -> str:
    """The name of a placement's row."""
    return next(name for name, row in STRATEGIES.items() if row == placement)
