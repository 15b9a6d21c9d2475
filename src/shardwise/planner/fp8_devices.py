"""Refuses fp8 plans for devices and models that cannot have it, before they are costed."""

from shardwise.errors import InvalidPlan
from shardwise.hardware import Device
from shardwise.plan import Plan
from shardwise.program.fp8_layers import why_no_layer
from shardwise.spec import ModelSpec


def check_planned_fp8(spec: ModelSpec, *, plan: Plan, device: Device) -> None:
    """Raise InvalidPlan for fp8 on a kind of device without it, or for a model without a layer that it is for."""
    if not plan.has_fp8:
        return
    if device.torch_type == "cuda" and device.fp8_flops_per_s is None:
        raise InvalidPlan(
            f"precision = 'fp8' on {device.name}: it has no fp8 products, as far as the hardware table knows (Ada, "
            "Hopper, Blackwell and CDNA 3 have); use precision bf16"
        )
    why = why_no_layer(spec, plan=plan)
    if why:
        raise InvalidPlan(why)
