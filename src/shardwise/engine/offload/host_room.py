"""Whether the host's memory holds what a plan keeps there: the kernel would end a process that takes more."""

from collections.abc import Mapping

import torch

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.dtypes import BYTES_PER_ELEMENT, PRECISIONS
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.hardware.host_memory import free_host_bytes
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.rules.context import has_states_on_host
from shardwise.program.spec import ModelSpec

# Of each parameter that is stepped: the fp32 master and two moments; and its gradient, where the CPU reads it.
_STEPPED_BYTES, _GRAD_BYTES = 4 + 8, 4


def check_host_room(
    spec: ModelSpec,
    *,
    plan: Plan,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    device: torch.device,
    held_bytes: int = 0,
) -> None:
    """Refuse to keep more in host memory than there is. All ranks of a host count: they fill it together.

    `held_bytes`: what this rank keeps there under a plan that this one replaces.
    """
    each = host_bytes(spec, plan=plan, placements=placements, mesh=mesh)
    num_ranks = min(mesh.num_ranks, torch.cuda.device_count()) if device.type == "cuda" else 1
    free_bytes = free_host_bytes()
    if (each - held_bytes) * num_ranks > free_bytes:
        raise InvalidPlan(
            f"offload_states: {num_ranks} x {bytes_text(each)} on this host, which has "
            f"{bytes_text(free_bytes + held_bytes * num_ranks)} of memory available; offload fewer units, use more "
            "hosts, or leave it out"
        )


def host_bytes(spec: ModelSpec, *, plan: Plan, placements: Mapping[str, Placement], mesh: Mesh) -> int:
    """Return what a rank keeps of states in host memory."""
    units = [unit for unit in spec.units if has_states_on_host(unit.name, plan=plan, placement=placements[unit.name])]
    num_elements = sum(param.num_elements for unit in units for param in unit.params if param.trainable)
    # What a unit gathers lies there in its compute dtype as well.
    staged = BYTES_PER_ELEMENT[PRECISIONS[plan.precision]] if plan.precision in ("bf16", "fp16") else 0
    read = _GRAD_BYTES if plan.offload_update == "host" else 0
    return num_elements // mesh.shard * (_STEPPED_BYTES + read + staged)
