"""Refuses models that this engine cannot run, before they are changed.

Without it gradients are averaged twice, ranks differ by the rows that they look up, or an error comes from deep inside
of torch. Since 5e135a50 (the first engine).
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import is_traceable_wrapper_subclass
from shardwise.base.vocabulary.while_alive import WhileAlive, hooked
from shardwise.comm.groups.dtensor import dtensor_types
from shardwise.engine.carry import find_engine
from shardwise.engine.guards.description import check_precision
from shardwise.plan import Plan

# Of a DistributedConfig of transformers: those that distribute a model, where they are more than 1.
_SIZES = ("fsdp_size", "tp_size", "pp_size", "ep_size")


def check_model(model: nn.Module, *, plan: Plan) -> None:
    """Refuse a model that is distributed already, is part of a prepared model, or would lose precision."""
    refuse_loaded_sharded(model)
    for path, module in model.named_modules():
        if _is_prepared(module):
            raise InvalidModel(
                f"{path or 'the model'} has been through shardwise.prepare already: prepare the outermost model only"
            )
        if isinstance(module, _wrappers()):
            raise InvalidModel(
                f"{path or 'the model'} is a {type(module).__name__}: hand the model inside to shardwise.prepare, "
                "which does the same by plan.strategy"
            )
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise InvalidModel(
                f"{path or 'the model'} is a {type(module).__name__} with max_norm, which changes the rows that a rank "
                "looks up, and so makes ranks differ: leave max_norm out, and after each update scale the rows inside "
                "`with shardwise.whole(model, write=True):`"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise InvalidModel(f"{name} has no shape yet (a lazy module): run the model once before shardwise.prepare")
        can_be_taken_apart = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        check_tensor(name, tensor, can_be_taken_apart=can_be_taken_apart)
        if hasattr(tensor, "_touched"):
            raise InvalidModel(
                f"{name} is part of another model that has been through shardwise.prepare: prepare both at once, in "
                "nn.ModuleDict({'one': …, 'other': …}), and call each as before"
            )
    check_precision(model, plan=plan)


def refuse_loaded_sharded(model: nn.Module) -> None:
    """Refuse a model of `from_pretrained(…, distributed_config=…)`, or `tp_plan=…`, which becomes such a config.

    As a DTensor it would be refused as well, by a name that the user has not written. Since e783b2e3.
    """
    for module in model.modules():
        if getattr(module, "_is_distributed_loading_by_transformers", False):
            config = getattr(getattr(module, "config", None), "distributed_config", None)
            sizes = {name: getattr(config, name, None) or 1 for name in _SIZES}
            said = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)
            raise InvalidModel(
                f"transformers has distributed this model as it loaded it ({said}): call from_pretrained without "
                "distributed_config and tp_plan; plan.strategy says how Shardwise shards it"
            )


def check_tensor(name: str, tensor: torch.Tensor, *, can_be_taken_apart: bool = False) -> None:
    """Refuse a tensor that cannot be put into a flat buffer."""
    if tensor.layout is not torch.strided:
        raise InvalidModel(
            f"{name} is {str(tensor.layout).removeprefix('torch.')}, and cannot be sharded: use a dense one"
        )
    if isinstance(tensor, dtensor_types()):
        raise InvalidModel(
            f"{name} is a DTensor (fully_shard, tensor parallel): shardwise.prepare takes the model as it was before, "
            "and shards it by plan.strategy"
        )
    if is_traceable_wrapper_subclass(tensor) and not can_be_taken_apart:
        kind = type(tensor)
        raise InvalidModel(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which only a frozen parameter can be: freeze it "
            "(requires_grad_(False)), or prepare the model with plain parameters"
        )


def _is_prepared(module: nn.Module) -> bool:
    engine = find_engine(module)
    return engine is not None and engine.plan.engine == "shardwise"


def _wrappers() -> tuple[type[Any], ...]:
    """Return torch's data-parallel wrappers; FSDP only if it was imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return found if fsdp is None else (*found, fsdp.FullyShardedDataParallel)


def _refuse_wrapper(parent: nn.Module, name: str, child: Any) -> None:
    """Refuse a wrapper around a prepared model: it would average the gradients a second time."""
    if isinstance(child, nn.Module) and _is_prepared(child) and isinstance(parent, _wrappers()):
        raise InvalidModel(
            f"{type(parent).__name__} around a model that has been through shardwise.prepare: it is distributed "
            "already; use it as it is"
        )


_PREPARED: WhileAlive[nn.Module] = WhileAlive(hooked(register_module_module_registration_hook, _refuse_wrapper))


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse torch's data-parallel wrappers around a prepared model, for as long as it exists."""
    _PREPARED.add(model)
