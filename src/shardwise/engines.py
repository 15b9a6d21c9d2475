"""Which engine runs a model: ours, or torch's own. The one place that asks; everything else is theirs.

torch's engine is imported when a plan asks for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.comm.collectives import Collectives
from shardwise.comm.watch import WATCH_SECONDS
from shardwise.engine import prepare as engine_prepare
from shardwise.engine.captured import capture as engine_capture
from shardwise.engine.engine import is_prepared
from shardwise.engine.guards.replicas import COMPARE_EVERY
from shardwise.engine.plan_change import replan as engine_replan
from shardwise.engine.prepared import accumulate as engine_accumulate
from shardwise.engine.prepared import clip as engine_clip
from shardwise.engine.prepared import full_state as engine_state
from shardwise.engine.prepared import grad_values as engine_grads
from shardwise.engine.prepared import slices as engine_slices
from shardwise.engine.prepared import uneven as engine_uneven
from shardwise.engine.prepared import weight_stream as engine_stream
from shardwise.engine.prepared import whole_parameters as engine_whole
from shardwise.errors import InvalidPlan
from shardwise.plan import Plan, as_plan

AnyOptimizer = TypeVar("AnyOptimizer", Optimizer, None, list[Optimizer])
Batch = TypeVar("Batch")
Step = TypeVar("Step", bound=Callable[..., Any])


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

    Collective: every rank of the job calls it. Where there is no process group it joins the job that torchrun, SLURM or
    our launcher started; without a launcher, a job of one rank. Values come from rank 0. `device` moves the model;
    without it the model stays where it is (from meta: this rank's GPU, or the CPU). `optimizer` may be None, and be
    made later, or a list. Models that share parameters are prepared at once, in an nn.ModuleDict, and called one by one
    as before.

    engine = 'shardwise'   the same two objects come back. The optimizer may be any that updates each parameter by
                           itself; whether it can step slices is tried out, and `any_optimizer` leaves that out.
                           `collectives` replaces the plan's, for tests; when a rank has held up the others for
                           `watch_seconds`, it is named and the job ends (0: nobody watches); every `compare_every`
                           steps ranks compare what they hold alike (0: never). `weights`: values by name; rank 0 asks
                           for each once, so that a file can be read tensor by tensor.
    engine = 'torch'       under ddp the model comes back inside a DistributedDataParallel.
    """
    plan = as_plan(plan)
    if plan.engine != "torch":
        return engine_prepare.prepare(
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
    if collectives is not None:
        raise InvalidPlan("engine = 'torch' has collectives of its own: leave collectives out of prepare")
    if weights is not None:
        raise InvalidPlan("engine = 'torch' takes no weights: load them with shardwise.load_full_state_dict")
    if isinstance(optimizer, list):
        raise InvalidPlan("engine = 'torch' takes one optimizer; prepare with None, and make them afterwards")
    from shardwise.torch_engine.prepare import prepare_on_torch

    return prepare_on_torch(model, optimizer, plan, device=device)


def replan(model: nn.Module, plan: Plan) -> None:
    """Another plan for a prepared model, between two steps, without a checkpoint. Collective.

        shardwise.replan(model, Plan(strategy="fsdp"))      # on every rank; the loop continues as it was

    Strategy, overrides, mesh, recompute, offload, prefetch and the like may change; what decides what is computed
    (precision, units, …) may not. Parameters, gradients, optimizer state and averages (shardwise.EMA) move unit by
    unit: a rank holds no more than the larger of both plans and one unit. Training continues bit for bit as if it had
    been saved under the old plan and resumed under the new one. Steps that were captured are captured again.
    """
    if not is_prepared(model):
        raise InvalidPlan(
            "shardwise.replan needs a model of shardwise.prepare with engine = 'shardwise': torch's engines are made "
            "for one plan; save a checkpoint, and resume under the other"
        )
    engine_replan.replan(model, plan)


def capture(
    step: Step,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    functions: Sequence[Callable[..., Any]] = (),
    tell: Callable[[str], None] | None = None,
) -> Step:
    """`step` as CUDA graphs, as the plan's `capture` says: auto, on or off. Collective: every rank calls it.

        def step(batch):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = shardwise.capture(step, model, optimizer)

    After three ordinary steps the fourth is captured, and from there on replayed: no Python runs in it any more.
    Inputs are copied to where the graph reads them; a batch of other shapes runs as an ordinary step until that is
    captured too. The learning rate may change from step to step. Where the step looks at a truth value
    (`if mask.all():`), the graph assumes that it stays as it was and compares; a step for which it was not runs as an
    ordinary one. A step that cannot be captured is an error under `on`; under `auto` it stays an ordinary one.

    functions   what the step calls besides the model (a loss): variables that they depend on are looked at too
    tell        is given a line for each thing that is decided, on rank 0; without it they are warnings
    """
    if is_prepared(model):
        return engine_capture.capture(step, model, optimizer, functions=functions, tell=tell)
    from shardwise.torch_engine.prepare import check_on_torch

    check_on_torch(model)
    return step


def accumulate(model: nn.Module, *, enabled: bool = True) -> AbstractContextManager[None]:
    """A pass in here does not reduce its gradients; the next one outside reduces them all.

        for number, batch in enumerate(micro_batches):
            with shardwise.accumulate(model, enabled=number + 1 < len(micro_batches)):
                (loss_of(model, batch) / len(micro_batches)).backward()
        optimizer.step()

    The gradients add up on each rank, in the reduce dtype. Where the plan says `accumulate_reduced`, every backward
    reduces all the same, and the averages add up: a slice of memory instead of the whole, more communication.
    """
    if is_prepared(model):
        return engine_accumulate.accumulate(model, enabled=enabled)
    from shardwise.torch_engine.accumulate import accumulate_on_torch
    from shardwise.torch_engine.prepare import check_on_torch

    check_on_torch(model)
    return accumulate_on_torch(model, enabled=enabled)


def mean_count(model: nn.Module, count: float) -> float:
    """The mean over ranks of how many samples, or tokens, each of them holds: what to divide a summed loss by.

        loss = cross_entropy(model(x), y, reduction="sum") / shardwise.mean_count(model, num_tokens)

    is the mean over all ranks' tokens, however many each has. In an accumulation, give every pass the count of this
    rank's whole step. Collective, and it waits for the other ranks.
    """
    if is_prepared(model):
        return engine_uneven.mean_count(model, count)
    from shardwise.torch_engine.accumulate import mean_count_on_torch
    from shardwise.torch_engine.prepare import check_on_torch

    check_on_torch(model)
    return mean_count_on_torch(model, count)


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """This rank's batches, and then its last one again for as long as any other rank has some left.

        for batch in shardwise.join(model, loader):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    So every rank runs the loop equally often, and nobody waits for one that has gone. What a rank computes after its
    own batches does not count: averages are over the ranks that still have one. Collective, a small exchange a batch.
    """
    if is_prepared(model):
        return engine_uneven.join(model, batches)
    raise InvalidPlan(
        "shardwise.join needs engine = 'shardwise'; on torch's, DistributedDataParallel has a join() of its own"
    )


def edit(model: nn.Module) -> AbstractContextManager[None]:
    """Write into what the optimizer steps, outside of its step: every copy on every rank follows. Collective.

        with shardwise.edit(model), torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:      # this rank's slices
                    parameter.mul_(0.9)

    Without it such a write is refused where other ranks would keep the old values.
    """
    if is_prepared(model):
        return engine_slices.edit(model)
    from shardwise.torch_engine.prepare import check_on_torch

    # Each of torch's shards lies on one rank, and DDP's parameters are the optimizer's.
    check_on_torch(model)
    return nullcontext()


def whole(model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
    """The model's parameters are whole on every rank in here: to be read, or with `write` to be written. Collective.

        with shardwise.whole(model):
            averaged.update_parameters(model)

        with shardwise.whole(model, write=True), torch.no_grad():
            for parameter in model.parameters():      # the same on every rank
                parameter.clamp_(-1, 1)

    They show what the optimizer steps, in its dtype, and what is written goes there. No forward and no step in here. It
    takes the memory of all parameters in that dtype, where they are not whole in it already.
    """
    if is_prepared(model):
        return engine_whole.whole(model, write=write)
    from shardwise.torch_engine.prepare import check_on_torch

    check_on_torch(model)
    if isinstance(model, DistributedDataParallel):
        return nullcontext()
    raise InvalidPlan("shardwise.whole needs engine = 'shardwise': fully_shard's parameters are slices")


def weight_stream(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of all that a state dict holds, unit after unit in the order of a step. Collective.

        for name, tensor in shardwise.weight_stream(model, dtype=torch.bfloat16):      # on every rank, to the end
            if rank == 0:
                inference.load_weights([(name, tensor)])

    One unit's parameters are gathered at a time, so that it takes the memory of two at most (what the loop still holds,
    and what comes next), not of the model. `dtype`: floating-point tensors are cast before they are sent; without it
    they have all digits. No step in here; a rank that stops before the end is named to the others.
    """
    if is_prepared(model):
        return engine_stream.weight_stream(model, dtype=dtype)
    from shardwise.torch_engine.full_state import weight_stream_on_torch

    return weight_stream_on_torch(model, dtype=dtype)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; the norm they had, the same on every rank.

    Collective. As torch's, but of the whole gradient, wherever its slices lie.
    """
    if is_prepared(model):
        return engine_clip.clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    from shardwise.torch_engine.full_state import clip_grad_norm_on_torch

    return clip_grad_norm_on_torch(model, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Every element of the gradients between -clip_value and clip_value, as torch's function of this name does it."""
    if is_prepared(model):
        return engine_grads.clip_grad_value_(model, clip_value)
    from shardwise.torch_engine.full_state import clip_grad_value_on_torch

    return clip_grad_value_on_torch(model, clip_value)


def grad_norms(model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
    """Parameter → the norm of its whole gradient, the same on every rank; those without a gradient are left out.

        for name, norm in shardwise.grad_norms(model).items():      # between backward and step
            log(name, norm)

    Collective, and it waits for the device.
    """
    if is_prepared(model):
        return engine_grads.grad_norms(model, norm_type=norm_type)
    from shardwise.torch_engine.full_state import grad_norms_on_torch

    return grad_norms_on_torch(model, norm_type=norm_type)


def full_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """{"model": names → full tensors, "optimizer": names → full states, and groups}. Collective.

    With `rank0_only`, the other ranks take part and get an empty dict.
    """
    if is_prepared(model):
        return engine_state.full_state_dict(model, optimizer, rank0_only=rank0_only)
    from shardwise.torch_engine.full_state import full_state_dict_on_torch

    return full_state_dict_on_torch(model, optimizer, rank0_only=rank0_only)


def load_full_state_dict(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load what `full_state_dict(model, optimizer)` gave, under any plan, engine and number of ranks. Collective.

    `optimizer` may be None: the model alone is loaded. With `from_rank0`, only rank 0's `state` is read.
    """
    if is_prepared(model):
        return engine_state.load_full_state_dict(model, optimizer, state, from_rank0=from_rank0)
    from shardwise.torch_engine.full_state import load_full_state_dict_on_torch

    return load_full_state_dict_on_torch(model, optimizer, state, from_rank0=from_rank0)
