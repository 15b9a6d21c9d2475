"""A unit's parameters → its flat buffers: which share one, in which dtypes, and where each lies. No torch here.

The engine allocates by this, the planner counts by it, and the program takes its bytes from it.

`why_not_fp8` says which linear layers multiply in fp8 under a plan, since their weights lie last in a buffer; the
engine, the planner and `shardwise doctor` ask it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwise.base.vocabulary.dtypes import (
    BYTES_PER_ELEMENT,
    compute_dtype,
    has_gradients,
    is_floating_point,
    master_dtype,
    reduce_dtype,
)
from shardwise.base.vocabulary.layout import ALIGNMENT, Layout, lay_out
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

MULTIPLE = 16
"""Both sizes of an fp8 operand are multiples of this many elements: the hardware loads 16 bytes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A linear layer by the name of its weight; `why_not` is "" if it multiplies in fp8."""

    unit: str
    weight: TensorSpec
    why_not: str


def why_not_fp8(param: TensorSpec, *, unit: str, plan: Plan) -> str:
    """Return why a parameter is not multiplied in fp8, in a few words; "" if it is."""
    if param.aliases and len(param.shape) == 2:
        return f"shares its weight with {param.aliases[0]}"
    if not param.linear or not is_floating_point(param.dtype):
        return "is not the weight of an nn.Linear"
    if unit == ROOT:
        return "is in no unit but the root"
    if param.keep_fp32 or plan.keeps_fp32(param.name):
        return "is kept in fp32"
    if plan.keeps_bf16(param.name):
        return "is kept in bf16"
    rows, columns = param.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"is {columns} → {rows}, which must be multiples of {MULTIPLE}"
    if min(rows, columns) < plan.fp8_min_features:
        return f"is {columns} → {rows}, below fp8_min_features = {plan.fp8_min_features}"
    return ""


def is_fp8(param: TensorSpec, *, unit: str, plan: Plan) -> bool:
    """Return whether a parameter is multiplied in fp8."""
    return plan.has_fp8 and not why_not_fp8(param, unit=unit, plan=plan)


def fp8_weight_names(spec: ModelSpec, *, plan: Plan) -> frozenset[str]:
    """Return the names of the weights that a plan multiplies in fp8."""
    if not plan.has_fp8:
        return frozenset()
    return frozenset(layer.weight.name for layer in linear_layers(spec, plan=plan) if not layer.why_not)


def why_no_layer(spec: ModelSpec, *, plan: Plan) -> str:
    """Return the sentence that refuses fp8 for a model without a layer for it; "" if it has one."""
    # Layers of units first: their reasons say more.
    layers = sorted(linear_layers(spec, plan=plan), key=lambda layer: layer.unit == ROOT)
    if any(not layer.why_not for layer in layers):
        return ""
    why = f"{layers[0].weight.name} {layers[0].why_not}" if layers else "it has no nn.Linear"
    return f"precision = 'fp8', and no linear layer of the model can multiply in it: {why}; set precision = 'bf16'"


def linear_layers(spec: ModelSpec, *, plan: Plan) -> Iterator[LinearLayer]:
    """Yield every linear layer of a model, in the order of its units."""
    for unit in spec.units:
        for param in unit.params:
            if param.linear or (param.aliases and len(param.shape) == 2):
                yield LinearLayer(unit=unit.name, weight=param, why_not=why_not_fp8(param, unit=unit.name, plan=plan))


_ROOM = 16
"""Parameters that are not fp8 share the buffer of those that are if they are at most one in this many elements: norms
and biases do. Each of their elements then takes the place of several in the fp32 buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSpec:
    """Parameters of one unit that compute and are stepped in the same dtypes: they share one buffer.

    Frozen ones have a separate buffer, of which nothing is reduced or updated. `unstepped`: frozen, and given in their
    compute dtype: no optimizer steps them, so they have no wider master.

    num_fp8   how many of them, the last ones, are gathered in fp8 where parameters are sharded. Then the full buffer is
              one of bytes, one per element of the layout; the others have room for their wider elements
    """

    params: tuple[TensorSpec, ...]
    compute_dtype: str
    master_dtype: str
    reduce_dtype: str
    unstepped: bool = False
    num_fp8: int = 0

    def layout(self, *, num_slices: int, alignment: int = ALIGNMENT) -> Layout:
        num_wide = len(self.params) - self.num_fp8 if self.num_fp8 else 0
        shapes = tuple(param.shape for param in self.params)
        return _layout(shapes, num_slices, alignment, num_wide, self.compute_bytes)

    @property
    def has_gradients(self) -> bool:
        return has_gradients(self.master_dtype)

    @property
    def is_trained(self) -> bool:
        """Return whether its gradients are reduced and its parameters updated: all of them, if any is trained."""
        return self.has_gradients and any(param.trainable for param in self.params)

    @property
    def num_elements(self) -> int:
        """Without padding."""
        return sum(param.num_elements for param in self.params)

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of one element in the compute dtype."""
        return BYTES_PER_ELEMENT[self.compute_dtype]

    def full_bytes(self, *, sharded: bool) -> int:
        """Return the bytes of one element of the full buffer."""
        return 1 if self.num_fp8 and sharded else self.compute_bytes

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes that are gathered of a sharded buffer, without padding."""
        in_fp8 = sum(param.num_elements for param in self.params[-self.num_fp8 :]) if self.num_fp8 else 0
        return in_fp8 + self.compute_bytes * (self.num_elements - in_fp8)

    @property
    def master_bytes(self) -> int:
        return BYTES_PER_ELEMENT[self.master_dtype]

    @property
    def reduce_bytes(self) -> int:
        return BYTES_PER_ELEMENT[self.reduce_dtype]


def flat_specs(unit: UnitSpec, *, plan: Plan) -> tuple[FlatSpec, ...]:
    """Return the flat buffers of a unit, in the order of their first parameters."""
    return _flat_specs(unit, dtype_settings(plan))


DtypeSettings = tuple[Any, ...]
_SETTINGS = ("precision", "keep_fp32", "reduce_dtype", "fp8_recipe", "fp8_min_features", "keep_bf16")


def dtype_settings(plan: Plan) -> DtypeSettings:
    """Return the settings that dtypes depend on: the planner asks for the same unit under thousands of plans."""
    return tuple(getattr(plan, name) for name in _SETTINGS)


@lru_cache(maxsize=256)
def plan_with(settings: DtypeSettings) -> Plan:
    """Return a plan of these settings."""
    return Plan(**dict(zip(_SETTINGS, settings, strict=True)))


@lru_cache(maxsize=4096)
def _flat_specs(unit: UnitSpec, settings: DtypeSettings) -> tuple[FlatSpec, ...]:
    plan = plan_with(settings)
    together: dict[tuple[tuple[str, str], bool], list[TensorSpec]] = {}
    for param in unit.params:
        together.setdefault((param_dtypes(param, plan=plan), param.starts_trainable), []).append(param)
    return tuple(
        replace(flat, params=tuple(params), num_fp8=num_fp8)
        for ((computes, stepped), trained), group in together.items()
        for params, num_fp8 in _fp8_last(group, unit=unit.name, plan=plan, trained=trained)
        for flat in [
            FlatSpec(
                params=(),
                compute_dtype=computes,
                master_dtype=stepped,
                reduce_dtype=reduce_dtype(stepped, planned=plan.reduce_dtype),
                unstepped=stepped != master_dtype(params[0].dtype, precision=plan.precision),
            )
        ]
    )


def _fp8_last(params: list[TensorSpec], *, unit: str, plan: Plan, trained: bool) -> list[tuple[list[TensorSpec], int]]:
    """Return the parameters of each buffer, those that are gathered in fp8 last, and the number of these.

    A scale for each row would need whole rows, which slices cut: rowwise, and frozen weights, are gathered in bf16.
    """
    in_fp8 = [param for param in params if trained and is_fp8(param, unit=unit, plan=plan)]
    if not in_fp8 or plan.fp8_recipe != "tensorwise":
        return [(params, 0)]
    others = [param for param in params if param not in in_fp8]
    if not others:
        return [(in_fp8, len(in_fp8))]
    if _ROOM * sum(param.num_elements for param in others) <= sum(param.num_elements for param in in_fp8):
        return [([*others, *in_fp8], len(in_fp8))]
    return [(others, 0), (in_fp8, len(in_fp8))]


def param_dtypes(param: TensorSpec, *, plan: Plan) -> tuple[str, str]:
    """Return (compute dtype, dtype that the optimizer steps); of a frozen parameter, the dtype that it is held in."""
    kept = param.keep_fp32 or any(plan.keeps_fp32(name) for name in (param.name, *param.aliases))
    computes = compute_dtype(param.dtype, precision=plan.precision, keep_fp32=kept)
    if not param.starts_trainable and param.dtype == computes:
        return computes, computes
    return computes, master_dtype(param.dtype, precision=plan.precision)


def gather_bytes(unit: UnitSpec, *, plan: Plan, sharded: bool) -> int:
    """Return the bytes of all parameters, without padding: in their compute dtypes, or as sharded ones are gathered."""
    flats = flat_specs(unit, plan=plan)
    return sum(flat.gathered_bytes if sharded else flat.compute_bytes * flat.num_elements for flat in flats)


def num_fp8(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the number of weights that are gathered in fp8 where the unit's parameters are sharded."""
    return sum(flat.num_fp8 for flat in flat_specs(unit, plan=plan))


def update_gather_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of the buffers among them that an update changes."""
    return sum(flat.compute_bytes * flat.num_elements for flat in flat_specs(unit, plan=plan) if flat.is_trained)


def owned_bytes(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the bytes of the trained matrices with an owner, in the dtype in which they are stepped."""
    if not plan.owned or not plan.placement(unit.name).optim.is_sharded:
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


PIECE_BYTES = 512 * 2**20
"""Of a piece of the gradients of the root, an embedding or a head, if the plan has no piece_bytes.

These units come once in a step. A block is reduced while the next one computes, which would have to wait for all of
its pieces but the last: planned steps of Llama-3.1-8B would take 3% longer, of 70B 17%.
"""

MOST_PIECES = 256
"""Of a unit, each of which is a few operations of the program."""


def num_pieces(unit: UnitSpec, *, plan: Plan) -> int:
    """Return the number of pieces in which a unit's gradients are reduced; only our engine cuts sharded ones."""
    bound = plan.piece_bytes
    if bound is None and (unit.name == ROOT or unit.from_root):
        bound = PIECE_BYTES
    if not bound or not LIMITS[plan.engine].cuts_reduces or not plan.placement(unit.name).grads.is_sharded:
        return 1
    return min(max(-(-reduce_bytes(unit, plan=plan) // bound), 1), MOST_PIECES)


@lru_cache(maxsize=4096)
def _layout(shapes: tuple[tuple[int, ...], ...], num_slices: int, alignment: int, num_wide: int, width: int) -> Layout:
    return lay_out(shapes, num_slices=num_slices, alignment=alignment, num_wide=num_wide, width=width)
