"""Checks of both engines before a model is changed: its device, its precision, and a description to compare.

Without it ranks with different plans, models or optimizers would wait for each other, and a precision would change the
digits of float64 and packed weights, with no error. Since 7a86ec3b (torch's engines beside ours).
"""

import platform
import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import BatchNorm
from shardwise.base.vocabulary.dtypes import compute_dtype, master_dtype
from shardwise.comm.groups.agreement import exchange
from shardwise.comm.job.allocator_settings import allocator_settings
from shardwise.engine.guards.carried import describe_carried
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.model import why_hardly_cut
from shardwise.program.units.carried_tensors import is_packed
from shardwise.program.units.scripted import class_name, scripted_around

_BATCH_NORMS = {kind.__name__ for kind in (*BatchNorm.__subclasses__(), nn.SyncBatchNorm)}


def asked_device(model: nn.Module, *, device: torch.device | str | None) -> torch.device | None:
    """Return the device that was asked for, or that of the model; None for a model on the meta device."""
    if device is not None:
        return torch.device(device)
    found = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if len(found) > 1:
        raise InvalidModel(
            f"the model's parameters are on {', '.join(sorted(map(str, found)))}: move it to one device first"
        )
    return found.pop() if found else None


def check_precision(model: nn.Module, *, plan: Plan) -> None:
    """Refuse parameters that the plan's precision would damage: float64, and packed bits stored as floats."""
    if plan.precision == "native":
        return
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float64:
            raise InvalidModel(
                f"{name} is float64, and precision = {plan.precision!r} would make it float32: set precision = "
                "'native', or cast the model first (model.float())"
            )
        own = str(parameter.dtype).removeprefix("torch.")
        kept = {own} == {
            compute_dtype(own, precision=plan.precision, keep_fp32=False),
            master_dtype(own, precision=plan.precision),
        }
        if not kept and is_packed(parameter):
            raise InvalidModel(
                f"{name} is a quantised weight that is stored as {own}, and precision = {plan.precision!r} would "
                "change its bits: store it as uint8 (bitsandbytes: quant_storage=torch.uint8), or set precision = "
                "'native'"
            )
    modules = dict(model.named_modules())
    for path, module in modules.items():
        outer = scripted_around(path, modules=modules)
        kept_inside = plan.keeps_fp32(path) or class_name(module) in _BATCH_NORMS
        if outer is not None and kept_inside and plan.precision != "fp32" and not plan.keeps_fp32(outer):
            raise InvalidModel(
                f"{path} is to stay in fp32 under precision = {plan.precision!r}, and lies inside "
                f"{outer or 'the model'}, which torch.jit compiled and which does not cast its inputs: name that one "
                "in keep_fp32, or prepare the model as it was before torch.jit"
            )
        hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        if hooked and plan.precision != "fp32" and not plan.keeps_fp32(path):
            raise InvalidModel(
                f"{path or 'the model'} has torch.nn.utils.spectral_norm, whose buffers stay fp32 under precision = "
                f"{plan.precision!r}: use torch.nn.utils.parametrizations.spectral_norm, or name it in keep_fp32"
            )


def check_gradients(model: nn.Module) -> None:
    """Refuse gradients from before: they are this rank's own, and have no place where gradients are sharded."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InvalidModel(
                f"{name} has a gradient from before shardwise.prepare, which is of this rank alone: call "
                "model.zero_grad() or optimizer.zero_grad() first"
            )


def describe(model: nn.Module, *, spec: ModelSpec, plan: Plan) -> str:
    """Describe a plan and a model, one property per line. Ranks with different lines would wait for each other."""
    lines = [f"{name} = {value}" for name, value in plan.to_dict().items()]
    for unit in spec.units:
        lines += [f"{p.name} {list(p.shape)} {p.dtype} trainable={p.trainable}" for p in unit.params]
    lines += [f"buffer {name} {list(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    lines += describe_carried(model)
    return "\n".join(lines)


def warn_hardly_cut(spec: ModelSpec, *, plan: Plan, mesh: Mesh) -> None:
    """Warn, on rank 0, if parameters are sharded but most of them are in one unit."""
    line = why_hardly_cut(spec, units=plan.units)
    if not line or dist.get_rank() != 0 or mesh.shard == 1:
        return
    largest = max(spec.units, key=lambda unit: unit.num_params)
    if plan.placement(largest.name).params.is_sharded:
        warnings.warn(line, stacklevel=4)


def warn_crossing(plan: Plan, *, mesh: Mesh) -> None:
    """Warn, on rank 0, if gathers that are to stay inside a node cross nodes. Collective where states cross nodes."""
    if not plan.is_sharded_across:
        return
    hosts = exchange(platform.node())
    for first in range(0, mesh.num_ranks, mesh.shard):
        ranks = mesh.shard_group(first)
        found = list(dict.fromkeys(hosts[rank] for rank in ranks))
        if len(found) > 1 and dist.get_rank() == 0:
            warnings.warn(
                f"mesh {mesh} with across = {plan.across!r}: ranks {ranks[0]} to {ranks[-1]} gather parameters "
                f"together and are on {len(found)} nodes ({', '.join(found[:4])}), so that every gather crosses nodes; "
                "give a mesh of nodes × ranks per node, and number ranks node by node",
                stacklevel=4,
            )
            return


def advise_on_segments(plan: Plan, *, spec: ModelSpec, mesh: Mesh, device: torch.device) -> None:
    """Advise, on rank 0, to let the allocator's segments expand where GPUs shard without CUDA graphs."""
    is_sharded = mesh.shard > 1 and any(plan.placement(unit.name).optim.is_sharded for unit in spec.units)
    settings = allocator_settings() if device.type == "cuda" and not plan.captures else {}
    if is_sharded and settings and dist.get_rank() == 0:
        _tell_once(" ".join(f"{name}={value}" for name, value in settings.items()))


@cache
def _tell_once(setting: str) -> None:
    line = f"torch reserves less memory for sharded training if its processes start with {setting}"
    warnings.warn(f"{line} (shardwise train sets it)", stacklevel=5)
