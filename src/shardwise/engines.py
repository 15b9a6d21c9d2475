"""The door to both engines: `prepare` chooses the engine of a model, and the other functions call its method.

What they do is described where our engine does it (engine/prepared, engine/plan_change).
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary.tested_versions import warn_if_untested_torch
from shardwise.comm.groups.collectives import Collectives
from shardwise.comm.job.job_environment import start_of
from shardwise.comm.watch.watch import WATCH_SECONDS
from shardwise.engine import carry
from shardwise.engine.guards.replicas import COMPARE_EVERY
from shardwise.engine.our_engine import Engine
from shardwise.engine.prepare import prepare_on_ours
from shardwise.plan import Plan, as_plan
from shardwise.plan.limits import LIMITS
from shardwise.program.spec import ModelSpec

if TYPE_CHECKING:
    from shardwise.engine.torch_engine.torch_engine import TorchEngine

AnyEngine: TypeAlias = "Engine | TorchEngine"
AnyOptimizer = TypeVar("AnyOptimizer", Optimizer, None, list[Optimizer])
Given = ParamSpec("Given")
Result = TypeVar("Result")

find_engine: "Callable[[nn.Module], AnyEngine | None]" = carry.find_engine
require_engine: "Callable[[nn.Module], AnyEngine]" = carry.require_engine


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
    if find_engine(model) is not None:
        raise InvalidModel(f"this {type(model).__name__} has been through shardwise.prepare already")
    given = {"collectives": collectives, "weights": weights, "optimizers": isinstance(optimizer, list) or None}
    arguments = [name for name, value in given.items() if value is not None]
    LIMITS[plan.engine].check_call("prepare", plan, arguments=arguments)
    if plan.engine == "torch":
        # Imported only when a plan asks for it.
        from shardwise.engine.torch_engine.prepare import prepare_on_torch

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
        predict=_states_peaks,
    )


def _states_peaks(spec: ModelSpec, **setting: Any) -> dict[str, int]:
    """Predict for an out-of-memory error: only a job that fails imports the planner."""
    from shardwise.planner.memory.states_peak import states_peaks

    return states_peaks(spec, **setting)


def _of_engine(method: Callable[Concatenate[Engine, Given], Result]) -> Callable[Concatenate[nn.Module, Given], Result]:
    """Return the function that calls this method of a model's engine, whichever it is; ours describes it."""

    @wraps(method)
    def call(model: nn.Module, *given: Given.args, **options: Given.kwargs) -> Result:
        return getattr(require_engine(model), method.__name__)(*given, **options)  # type: ignore[no-any-return]

    own = inspect.signature(method)
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=nn.Module)
    call.__signature__ = own.replace(parameters=[model, *list(own.parameters.values())[1:]])  # type: ignore[attr-defined]
    call.__module__ = __name__
    # It may also be called with the model by its name.
    return call  # type: ignore[return-value]


replan = _of_engine(Engine.replan)
accumulate = _of_engine(Engine.accumulate)
mean_count = _of_engine(Engine.mean_count)
join = _of_engine(Engine.join)
edit = _of_engine(Engine.edit)
whole = _of_engine(Engine.whole)
weight_stream = _of_engine(Engine.weight_stream)
clip_grad_norm_ = _of_engine(Engine.clip_grad_norm_)
clip_grad_value_ = _of_engine(Engine.clip_grad_value_)
grad_norms = _of_engine(Engine.grad_norms)
full_state_dict = _of_engine(Engine.full_state_dict)
load_full_state_dict = _of_engine(Engine.load_full_state_dict)
