"""The functions that users call on a model. `prepare` chooses the engine; the others call the engine of the model."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.collectives import Collectives
from shardwise.comm.job_environment import start_of
from shardwise.comm.watch import WATCH_SECONDS
from shardwise.engine.guards.replicas import COMPARE_EVERY
from shardwise.engine.prepare import prepare_on_ours
from shardwise.engine.protocol import Batch, require_engine
from shardwise.plan import Plan, as_plan
from shardwise.plan.limits import LIMITS
from shardwise.vocabulary.tested_versions import warn_if_untested_torch

AnyOptimizer = TypeVar("AnyOptimizer", Optimizer, None, list[Optimizer])


def prepare(
    model: nn.Module,
    optimizer: AnyOptimizer,
    plan: Plan | str,
    *,
    device: torch.device | str | None = None,
    any_optimizer: bool = False,
    collectives: Collectives | None = None,
    watch_seconds: float = WATCH_SECONDS,
    compare_every: int = COMPARE_EVERY,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, AnyOptimizer]:
    """Make `model` and `optimizer` run `plan`; then train what is returned with an ordinary loop.

    `plan` may also be the name of a strategy: `prepare(model, optimizer, "fsdp")`.

    Collective: every rank of the job calls it. Without a process group it joins the job that torchrun, SLURM or our
    launcher started; without a launcher, a job of one rank. Values come from rank 0. `device` moves the model; without
    it the model stays where it is (from meta: this rank's GPU, or the CPU). `optimizer` may be None and be created
    later, or a list. Models that share parameters are prepared together, in an nn.ModuleDict, and called one by one as
    before.

    engine = 'shardwise'   returns the same two objects. The optimizer may be any that updates each parameter by itself.
                           Whether it can step slices is tested on small tensors; `any_optimizer` skips that test.
                           `collectives` replaces the plan's, for tests. When a rank has held up the others for
                           `watch_seconds`, it is named and the job ends (0: no watch). Every `compare_every` steps
                           ranks compare their replicated state (0: never). `weights` are values by name; rank 0 asks
                           for each once, so that a file can be read tensor by tensor.
    engine = 'torch'       under ddp, returns the model inside a DistributedDataParallel.
    """
    # Before the engine, which may stop at a private name of torch that is gone.
    if (dist.get_rank() if dist.is_initialized() else start_of(os.environ).rank) == 0:
        warn_if_untested_torch()
    plan = as_plan(plan)
    given = {"collectives": collectives, "weights": weights, "optimizers": isinstance(optimizer, list) or None}
    arguments = [name for name, value in given.items() if value is not None]
    LIMITS[plan.engine].check_call("prepare", plan, arguments=arguments)
    if plan.engine == "torch":
        # Imported only when a plan asks for it.
        from shardwise.torch_engine.prepare import prepare_on_torch

        assert not isinstance(optimizer, list)
        return prepare_on_torch(model, optimizer, plan, device=device)
    return prepare_on_ours(
        model,
        optimizer,
        plan,
        device=device,
        any_optimizer=any_optimizer,
        collectives=collectives,
        watch_seconds=watch_seconds,
        compare_every=compare_every,
        weights=weights,
    )


def replan(model: nn.Module, plan: Plan) -> None:
    """Change the plan of a prepared model between two steps, without a checkpoint. Collective.

        shardwise.replan(model, Plan(strategy="fsdp"))      # on every rank; the loop continues as it was

    Strategy, overrides, mesh, recompute, offload, prefetch and the like may change; settings that decide what is
    computed (precision, units, …) may not. Parameters, gradients, optimizer state and averages (shardwise.EMA) move
    unit by unit: a rank holds no more than the larger of both plans and one unit. Training continues bit for bit as if
    it had been saved under the old plan and resumed under the new one.
    """
    require_engine(model).replan(model, plan)


def accumulate(model: nn.Module, *, enabled: bool = True) -> AbstractContextManager[None]:
    """Skip the reduction of gradients in this block; the next backward outside reduces them all.

        for number, batch in enumerate(micro_batches):
            with shardwise.accumulate(model, enabled=number + 1 < len(micro_batches)):
                (loss_of(model, batch) / len(micro_batches)).backward()
        optimizer.step()

    The gradients add up on each rank, in the reduce dtype. Under a plan with `accumulate_reduced`, every backward
    reduces, and the averages add up: a slice of memory instead of the whole, and more communication.
    """
    return require_engine(model).accumulate(model, enabled=enabled)


def mean_count(model: nn.Module, count: float) -> float:
    """Return the mean over ranks of the number of samples, or tokens, that each holds: divide a summed loss by it.

        loss = cross_entropy(model(x), y, reduction="sum") / shardwise.mean_count(model, num_tokens)

    is the mean over all ranks' tokens, however many each has. In an accumulation, give every pass the count of this
    rank's whole step. Collective, and it waits for the other ranks.
    """
    return require_engine(model).mean_count(model, count)


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield this rank's batches, then its last one again while any other rank has batches left.

        for batch in shardwise.join(model, loader):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    So every rank runs the loop equally often, and no rank waits for one that has finished. What a rank computes after
    its own batches does not count: averages are over the ranks that still have one. Collective: one small exchange per
    batch.
    """
    return require_engine(model).join(model, batches)


def edit(model: nn.Module) -> AbstractContextManager[None]:
    """Allow writes into the tensors that the optimizer steps; all copies on all ranks follow. Collective.

        with shardwise.edit(model), torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:      # this rank's slices
                    parameter.mul_(0.9)

    Without it, such a write raises an error if other ranks would keep the old values.
    """
    return require_engine(model).edit(model)


def whole(model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
    """Make the parameters whole on every rank in this block, to read them, or with `write` to write them. Collective.

        with shardwise.whole(model):
            averaged.update_parameters(model)

        with shardwise.whole(model, write=True), torch.no_grad():
            for parameter in model.parameters():      # the same on every rank
                parameter.clamp_(-1, 1)

    They have the values and the dtype that the optimizer steps, and writes go there. No forward and no step inside. It
    takes the memory of all parameters in that dtype, unless they are whole in it already.
    """
    return require_engine(model).whole(model, write=write)


def weight_stream(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the whole state dict, unit after unit in the order of a step. Collective.

        for name, tensor in shardwise.weight_stream(model, dtype=torch.bfloat16):      # on every rank, to the end
            if rank == 0:
                inference.load_weights([(name, tensor)])

    One unit is gathered at a time, so it takes the memory of two units at most (the one that the loop still holds, and
    the next), not of the model. With `dtype`, floating-point tensors are cast before they are sent; without it they
    have full precision. No step inside; a rank that stops before the end is named to the others.
    """
    return require_engine(model).weight_stream(model, dtype=dtype)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    parameters: Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm that they had, on every rank.

    Collective. Like torch's function, but over the whole gradient, on whatever ranks its slices are. With `parameters`
    (some of the model's), only their gradients are scaled, by their norm.
    """
    return require_engine(model).clip_grad_norm_(
        model, max_norm, norm_type, parameters=parameters, error_if_nonfinite=error_if_nonfinite
    )


def clip_grad_value_(model: nn.Module, clip_value: float, *, parameters: Iterable[Tensor] | None = None) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value], like torch's function of this name.

    With `parameters` (some of the model's), only of their gradients.
    """
    require_engine(model).clip_grad_value_(model, clip_value, parameters=parameters)


def grad_norms(model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each parameter's whole gradient, the same on every rank; parameters without one are left out.

        for name, norm in shardwise.grad_norms(model).items():      # between backward and step
            log(name, norm)

    Collective, and it waits for the device.
    """
    return require_engine(model).grad_norms(model, norm_type=norm_type)


def full_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return {"model": names → full tensors, "optimizer": names → full states, and groups}. Collective.

    With `rank0_only`, the other ranks take part and get an empty dict.
    """
    return require_engine(model).full_state_dict(model, optimizer, rank0_only=rank0_only)


def load_full_state_dict(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load a state of `full_state_dict`, saved under any plan, engine and number of ranks. Collective.

    `optimizer` may be None: the model alone is loaded. With `from_rank0`, only rank 0's `state` is read.
    """
    require_engine(model).load_full_state_dict(model, optimizer, state, from_rank0=from_rank0)
