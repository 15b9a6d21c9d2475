"""Sets up the same training on Megatron-FSDP (package megatron-fsdp).

    ddp      zero_dp_strategy 0: nothing is sharded         zero2   2: gradients too
    zero1    1: the optimizer's state                       fsdp    3: parameters too

It computes in the dtype of the module's parameters, and keeps fp32 copies for the optimizer; gradients are reduced and
kept in the plan's reduce dtype. Captured, it runs with `cuda_graph_mode` and double buffers, which keep gradients and
buffers at fixed addresses.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.core.precision import planned_dtype
from shardwise.engine.torch_engine.prepare import rename_parameters
from shardwise.measure.bench.contestants import STAGES
from shardwise.measure.bench.peer_setup import accumulating, make_real, unit_classes
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.training_state import Update


def by_megatron(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device, captured: bool = False
) -> tuple[nn.Module, Optimizer, Update]:
    """Call `fully_shard_model` on the units' classes, and `fully_shard_optimizer`; the groups are not changed."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    plan = config.plan
    make_real(model, optimizer, plan=plan, device=device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _to_compute_dtype(model, plan=plan)
    reduce_dtype = planned_dtype(plan.reduce_dtype)
    prepared = fully_shard_model(
        module=model,
        fsdp_unit_modules=sorted(unit_classes(model, plan=plan), key=lambda kind: kind.__name__),
        zero_dp_strategy=STAGES[plan.strategy],
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=reduce_dtype, grad_comm_dtype=reduce_dtype
        ),
        # A bench writes no checkpoints.
        preproc_state_dict_for_dcp_ckpt=False,
        cuda_graph_mode=captured,
        fsdp_double_buffer=captured,
    )
    prepared._replace_param_with_distributed_if_needed()
    rename_parameters(optimizer, names=names, parameters=dict(prepared.module.named_parameters()))
    _shard_optimizer(optimizer, by=fully_shard_optimizer)

    def no_sync(enabled: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = prepared.no_sync() if enabled else nullcontext()
        return context

    def clip(max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(prepared.parameters(), max_norm)

    return prepared, optimizer, accumulating(optimizer, backward=Tensor.backward, clip=clip, no_sync=no_sync)


def _to_compute_dtype(model: nn.Module, *, plan: Plan) -> None:
    """Cast parameters and inputs to the compute dtype; Megatron reads the fp32 values for the optimizer."""
    dtype = planned_dtype(plan.precision)
    if dtype is None or dtype == torch.float32:
        return
    for parameter in model.parameters():
        full = parameter.detach()
        parameter.data = full.to(dtype)
        # Megatron calls these on parameters of lower precision than fp32.
        parameter.get_high_precision_init_val = lambda full=full: full  # type: ignore[attr-defined]
        parameter.clear_high_precision_init_val = lambda: None  # type: ignore[attr-defined]

    def cast(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
        )

    model.register_forward_pre_hook(cast)


def _shard_optimizer(optimizer: Optimizer, *, by: Any) -> None:
    """Shard the optimizer. It takes a step on zero gradients to make the states: with rate 0, and not counted."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    by(optimizer, preproc_state_dict_for_dcp_ckpt=False)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
