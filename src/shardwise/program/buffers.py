"""A unit's parameters → its flat buffers: which share one, in which dtypes, and where each lies. No torch here.

The engine allocates by this, the planner counts by it, and the program takes its bytes from it.
"""

from dataclasses import dataclass
from functools import lru_cache

from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED
from shardwise.spec import TensorSpec, UnitSpec
from shardwise.vocabulary.dtypes import BYTES_PER_ELEMENT, compute_dtype, has_gradients, master_dtype, reduce_dtype
from shardwise.vocabulary.layout import ALIGNMENT, Layout, lay_out

SAMPLED_EVERY = 61
"""One in this many elements of a captured step's gradients is compared with an ordinary step's at intervals. A prime
number, so that each column of a matrix is compared at some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSpec:
    """Parameters of one unit that compute and are stepped in the same dtypes: they share one buffer.

    Frozen ones have a separate buffer, of which nothing is reduced or updated. `unstepped`: frozen, and given in their
    compute dtype: no optimizer steps them, so they have no wider master.
    """

    params: tuple[TensorSpec, ...]
    compute_dtype: str
    master_dtype: str
    reduce_dtype: str
    unstepped: bool = False

    def layout(self, *, num_slices: int, alignment: int = ALIGNMENT) -> Layout:
        return _layout(tuple(param.shape for param in self.params), num_slices, alignment)

    @property
    def has_gradients(self) -> bool:
        return has_gradients(self.master_dtype)

    @property
    def is_trained(self) -> bool:
        """Whether its gradients are reduced and its parameters updated: all of them, if any is trained."""
        return self.has_gradients and any(param.trainable for param in self.params)

    @property
    def num_elements(self) -> int:
        """Without padding."""
        return sum(param.num_elements for param in self.params)

    @property
    def compute_bytes(self) -> int:
        """Of one element."""
        return BYTES_PER_ELEMENT[self.compute_dtype]

    @property
    def master_bytes(self) -> int:
        return BYTES_PER_ELEMENT[self.master_dtype]

    @property
    def reduce_bytes(self) -> int:
        return BYTES_PER_ELEMENT[self.reduce_dtype]


def flat_specs(unit: UnitSpec, *, plan: Plan) -> tuple[FlatSpec, ...]:
    """Return the flat buffers of a unit, in the order of their first parameters."""
    return _flat_specs(unit, plan.precision, plan.keep_fp32, plan.reduce_dtype)


@lru_cache(maxsize=4096)
def _flat_specs(
    unit: UnitSpec, precision: str, keep_fp32: tuple[str, ...], planned_reduce: str
) -> tuple[FlatSpec, ...]:
    """Return them by the settings that matter: the planner asks for the same unit under thousands of plans."""
    plan = Plan(precision=precision, keep_fp32=keep_fp32, reduce_dtype=planned_reduce)
    together: dict[tuple[tuple[str, str], bool], list[TensorSpec]] = {}
    for param in unit.params:
        together.setdefault((param_dtypes(param, plan=plan), param.starts_trainable), []).append(param)
    return tuple(
        FlatSpec(
            params=tuple(params),
            compute_dtype=computes,
            master_dtype=stepped,
            reduce_dtype=reduce_dtype(stepped, planned=plan.reduce_dtype),
            unstepped=stepped != master_dtype(params[0].dtype, precision=precision),
        )
        for ((computes, stepped), _), params in together.items()
    )


def param_dtypes(param: TensorSpec, *, plan: Plan) -> tuple[str, str]:
    """Return (compute dtype, dtype that the optimizer steps); of a frozen parameter, the dtype that it is held in."""
    kept = param.keep_fp32 or any(plan.keeps_fp32(name) for name in (param.name, *param.aliases))
    computes = compute_dtype(param.dtype, precision=plan.precision, keep_fp32=kept)
    if not param.starts_trainable and param.dtype == computes:
        return computes, computes
    return computes, master_dtype(param.dtype, precision=plan.precision)


def gather_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of all parameters in their compute dtypes, without padding."""
    return sum(flat.compute_bytes * flat.num_elements for flat in flat_specs(unit, plan=plan))


def update_gather_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of the buffers among them that an update changes."""
    return sum(flat.compute_bytes * flat.num_elements for flat in flat_specs(unit, plan=plan) if flat.is_trained)


def owned_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of the trained matrices with an owner, in the dtype in which they are stepped."""
    if not plan.owned or plan.placement(unit.name).optim is not SHARDED:
        return 0
    return sum(
        flat.master_bytes * param.num_elements
        for flat in flat_specs(unit, plan=plan)
        for param in flat.params
        if flat.is_trained and param.trainable and plan.owns(param.name)
    )


def reduce_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of the gradients of trained buffers, in their reduce dtypes, without padding."""
    return sum(flat.reduce_bytes * flat.num_elements for flat in flat_specs(unit, plan=plan) if flat.is_trained)


@lru_cache(maxsize=4096)
def _layout(shapes: tuple[tuple[int, ...], ...], num_slices: int, alignment: int) -> Layout:
    return lay_out(shapes, num_slices=num_slices, alignment=alignment)
