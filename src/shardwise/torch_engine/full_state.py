"""The gradients' norms and full state dicts of a model on torch's own engine, in the form that our engine gives."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwise.comm.dtensor import local_part
from shardwise.engine.prepared.full_state import check_order, received_state
from shardwise.errors import InvalidData
from shardwise.torch_engine.prepare import check_on_torch


@torch.no_grad()
def clip_grad_norm_on_torch(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """torch's own `clip_grad_norm_`, with a plain tensor for the norm that the gradients had. Collective."""
    check_on_torch(model)
    parameters = list(model.parameters())
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm(grads, norm_type)
    whole: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
    if error_if_nonfinite and not whole.isfinite():
        raise InvalidData(f"the norm of the gradients is {whole.item()}: they cannot be clipped")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return whole


@torch.no_grad()
def clip_grad_value_on_torch(model: nn.Module, clip_value: float) -> None:
    """torch's own, of this rank's shards."""
    check_on_torch(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            local_part(parameter.grad).clamp_(-clip_value, clip_value)


@torch.no_grad()
def grad_norms_on_torch(model: nn.Module, *, norm_type: float) -> dict[str, float]:
    """Parameter → the norm of its whole gradient. Collective."""
    check_on_torch(model)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    norms = {
        name: torch.linalg.vector_norm(parameter.grad, norm_type, dtype=torch.float64)
        for name, parameter in bare.named_parameters()
        if parameter.grad is not None
    }
    return {name: (n.full_tensor() if isinstance(n, DTensor) else n).item() for name, n in norms.items()}


def weight_stream_on_torch(model: nn.Module, *, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the state dict, one after the other. Collective."""
    check_on_torch(model)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    for name, value in bare.state_dict().items():
        if isinstance(value, Tensor):
            cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            yield name, cast.full_tensor() if isinstance(cast, DTensor) else cast.clone()


def full_state_dict_on_torch(
    model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """{"model": names → full tensors, "optimizer": names → full states, and groups}. Collective.

    With `rank0_only`, the other ranks take part and get an empty dict.
    """
    check_on_torch(model)
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return {} if rank0_only and dist.get_rank() != 0 else _copy(state)


def load_full_state_dict_on_torch(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load what `full_state_dict(model, optimizer)` gave, under any plan, engine and number of ranks. Collective.

    With `from_rank0`, only rank 0's `state` is read.
    """
    check_on_torch(model)
    check_order(optimizer)
    state = received_state(state, with_optimizer=optimizer is not None, from_rank0=from_rank0)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(state["model"]), options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, _copy(state["optimizer"]), options=options)


def _copy(state: Any) -> Any:
    """Tensors of its own: torch gives out, and takes in, those that training will change."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
