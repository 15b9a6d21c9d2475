"""Our engine by the protocol: each method calls the function that does the work."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.captured.capture import capture
from shardwise.engine.engine import engine_of
from shardwise.engine.plan_change.replan import fixed_by, replan
from shardwise.engine.prepared import accumulate, full_state, grad_norms, slices, uneven, weight_stream
from shardwise.engine.prepared.inventory import held_tensors
from shardwise.engine.prepared.whole_parameters import whole
from shardwise.engine.protocol import Batch, OwnedModel, Step, Tell, TrainingEngine
from shardwise.plan import Plan


class OurEngine(TrainingEngine):
    """The engine that runs step programs. The parts of each model's engine are in engine.py."""

    # State

    def plan_of(self, model: nn.Module) -> Plan:
        return engine_of(model).plan

    def bare(self, model: nn.Module) -> nn.Module:
        return model

    def held(self, model: nn.Module) -> OwnedModel:
        return slices.held(model)

    def slices_filled(self, model: nn.Module) -> None:
        slices.slices_filled(model)

    def group_names(self, model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
        return slices.group_names(model, optimizer)

    def check_values(self, model: nn.Module, *, what: str) -> None:
        engine_of(model).core.passes.check_values(what)

    def held_tensors(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
        return held_tensors(model, optimizer)

    def listen_to_writes(self, model: nn.Module, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        events = engine_of(model).core.events
        for event in (events.update_begins, events.values_read):
            if hear not in event:
                event.append(hear)

    def replays_updates(self, model: nn.Module) -> bool:
        return bool(engine_of(model).captured)

    # Plans and steps

    def replan(self, model: nn.Module, plan: Plan) -> None:
        replan(model, plan)

    def fixed_by(self, model: nn.Module, plan: Plan) -> str:
        return fixed_by(engine_of(model), plan=plan)

    def capture(
        self,
        step: Step,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        functions: Sequence[Callable[..., Any]] = (),
        tell: Tell | None = None,
    ) -> Step:
        return capture(step, model, optimizer, functions=functions, tell=tell)

    def accumulate(self, model: nn.Module, *, enabled: bool = True) -> AbstractContextManager[None]:
        return accumulate.accumulate(model, enabled=enabled)

    def mean_count(self, model: nn.Module, count: float) -> float:
        return uneven.mean_count(model, count)

    def join(self, model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
        return uneven.join(model, batches)

    def concerns(self, model: nn.Module, optimizer: Optimizer) -> bool:
        owned = engine_of(model).owned
        return owned.adopted(optimizer) or owned.concerns(optimizer)

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> None:
        engine_of(model).owned.adopt_on_all_ranks(optimizer)

    def allocate_states(self, model: nn.Module, optimizer: Optimizer) -> None:
        engine_of(model).owned.streamed.allocate_others(optimizer)

    def showing_parameters(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        owned = engine_of(model).owned
        return owned.showing_parameters(optimizer) if owned.adopted(optimizer) else nullcontext()

    def announce_loss(self, model: nn.Module, loss: Tensor) -> None:
        engine_of(model).core.announce(loss)

    def settle(self, model: nn.Module) -> None:
        engine_of(model).core.wait_gathers()

    def replayed_calls(self, model: nn.Module) -> tuple[int, int]:
        graphs = engine_of(model).graphs
        return (0, 0) if graphs is None else (graphs.num_calls, graphs.num_replayed)

    def omit_memory_advice(self, model: nn.Module) -> None:
        engine_of(model).predicts_alone = False

    # Weights

    def edit(self, model: nn.Module) -> AbstractContextManager[None]:
        return slices.edit(model)

    def whole(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
        return whole(model, write=write)

    def weight_stream(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return weight_stream.weight_stream(model, dtype=dtype)

    def full_state_dict(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        return full_state.full_state_dict(model, optimizer, rank0_only=rank0_only)

    def load_full_state_dict(
        self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
    ) -> None:
        full_state.load_full_state_dict(model, optimizer, state, from_rank0=from_rank0)

    # Gradients

    def clip_grad_norm_(
        self,
        model: nn.Module,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        return grad_norms.clip_grad_norm_(
            model, max_norm, norm_type, parameters=parameters, error_if_nonfinite=error_if_nonfinite
        )

    def clip_grad_value_(
        self, model: nn.Module, clip_value: float, *, parameters: Iterable[Tensor] | None = None
    ) -> None:
        grad_norms.clip_grad_value_(model, clip_value, parameters=parameters)

    def grad_norms(self, model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
        return grad_norms.grad_norms(model, norm_type=norm_type)

    def buckets(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the buckets of the program; the spec has the order of units that the first step has learned."""
        return {bucket.name: bucket.units for bucket in engine_of(model).core.program.buckets}
