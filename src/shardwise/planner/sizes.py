"""The sizes of units under a plan, in elements and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardwise.plan import Plan
from shardwise.program.buffers import DtypeSettings, dtype_settings, gather_bytes, param_dtypes, plan_with, reduce_bytes
from shardwise.spec import ModelSpec, UnitSpec
from shardwise.vocabulary.dtypes import BYTES_PER_ELEMENT

MASTER_BYTES = 4
"""Bytes per element that the optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """A unit.

    elements            of all parameters; `trainable`: of the trainable ones, in `tensors` tensors
    compute_bytes       all parameters in their compute dtypes
    grad_bytes          gradients in the dtypes of autograd
    reduce_bytes        gradients in the reduce dtype
    """

    elements: int
    trainable: int
    tensors: int
    compute_bytes: int
    grad_bytes: int
    reduce_bytes: int

    @property
    def is_cast(self) -> bool:
        """Return whether the compute dtype differs from the optimizer's."""
        return self.compute_bytes != MASTER_BYTES * self.elements


def sizes_of(spec: ModelSpec, *, plan: Plan) -> Mapping[str, UnitSizes]:
    return _sizes(spec, dtype_settings(plan))


@lru_cache(maxsize=64)
def _sizes(spec: ModelSpec, settings: DtypeSettings) -> Mapping[str, UnitSizes]:
    plan = plan_with(settings)
    return {unit.name: _unit_sizes(unit, plan=plan) for unit in spec.units}


def _unit_sizes(unit: UnitSpec, *, plan: Plan) -> UnitSizes:
    trained = [param for param in unit.params if param.trainable]
    return UnitSizes(
        elements=unit.num_params,
        trainable=sum(param.num_elements for param in trained),
        tensors=len(trained),
        compute_bytes=gather_bytes(unit, plan=plan, sharded=False),
        grad_bytes=sum(p.num_elements * BYTES_PER_ELEMENT[param_dtypes(p, plan=plan)[0]] for p in trained),
        reduce_bytes=reduce_bytes(unit, plan=plan),
    )
