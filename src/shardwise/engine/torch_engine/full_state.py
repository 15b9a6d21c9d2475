"""State dicts and gradients of a model on torch's engines, in the form that our engine gives."""

from collections.abc import Iterable, Iterator, Mapping
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
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import InvalidData
from shardwise.comm.groups.dtensor import local_part
from shardwise.engine.prepared.full_state import check_order, received_state
from shardwise.engine.prepared.grad_norms import chosen
from shardwise.engine.torch_engine.plain_model import PlainModel


@torch.no_grad()
def clip_grad_norm_(
    engine: PlainModel,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    parameters: Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip as torch's function does, and return the norm before clipping as a plain tensor. Collective."""
    named = chosen(engine.model, parameters)
    clipped = [parameter for parameter in engine.model.parameters() if named is None or id(parameter) in named]
    grads = [parameter.grad for parameter in clipped if parameter.grad is not None]
    total = nn.utils.get_total_norm(grads, norm_type)
    norm = _full(total)
    if error_if_nonfinite and not norm.isfinite():
        raise InvalidData(f"the norm of the gradients is {norm.item()}: they cannot be clipped")
    nn.utils.clip_grads_with_norm_(clipped, max_norm, total)
    return norm


@torch.no_grad()
def clip_grad_value_(engine: PlainModel, clip_value: float, *, parameters: Iterable[Tensor] | None = None) -> None:
    """Clamp each element of this rank's gradients."""
    named = chosen(engine.model, parameters)
    for parameter in engine.model.parameters():
        if parameter.grad is not None and (named is None or id(parameter) in named):
            local_part(parameter.grad).clamp_(-clip_value, clip_value)


@torch.no_grad()
def grad_norms(engine: PlainModel, *, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each parameter's whole gradient by name. Collective."""
    return {
        name: _full(torch.linalg.vector_norm(parameter.grad, norm_type, dtype=torch.float64)).item()
        for name, parameter in engine.bare.named_parameters()
        if parameter.grad is not None
    }


def weight_stream(engine: PlainModel, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) for each tensor of the state dict. Collective."""
    for name, value in engine.bare.state_dict().items():
        if isinstance(value, Tensor):
            cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            yield name, _full(cast) if isinstance(cast, DTensor) else cast.clone()


def full_state_dict(
    engine: PlainModel, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return {"model": names → full tensors, "optimizer": names → full states, and groups}. Collective."""
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = {"model": get_model_state_dict(engine.model, options=options)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(engine.model, optimizer, options=options)
    return {} if rank0_only and dist.get_rank() != 0 else _copy(state)


def load_full_state_dict(
    engine: PlainModel, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load a state of `full_state_dict`, saved under any plan, engine and number of ranks. Collective."""
    check_order(optimizer)
    state = received_state(state, with_optimizer=optimizer is not None, from_rank0=from_rank0)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(engine.model, dict(state["model"]), options=options)
    if optimizer is not None:
        set_optimizer_state_dict(engine.model, optimizer, _copy(state["optimizer"]), options=options)


def _full(tensor: Tensor) -> Tensor:
    """Return a DTensor as one whole tensor on every rank. Collective."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def _copy(state: Any) -> Any:
    """Copy all tensors: torch returns, and keeps, those that training will change."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
