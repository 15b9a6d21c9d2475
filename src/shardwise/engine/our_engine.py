"""The methods of our engine by the protocol: most of them are the functions that do the work."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.plan_change import replan
from shardwise.engine.prepared import (
    accumulate,
    full_state,
    grad_norms,
    inventory,
    slices,
    uneven,
    weight_stream,
    whole_parameters,
)
from shardwise.plan import Plan


class OurEngine(Engine):
    """The engine of a model that runs step programs."""

    # State

    def plan_of(self, model: nn.Module) -> Plan:
        return self.core.followed.plan

    def bare(self, model: nn.Module) -> nn.Module:
        return model

    held = slices.held
    slices_filled = slices.slices_filled
    group_names = slices.group_names
    held_tensors = inventory.held_tensors

    def check_values(self, model: nn.Module, *, what: str) -> None:
        self.core.setting.passes.check_values(what)

    def listen_to_writes(self, model: nn.Module, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        events = self.core.setting.events
        for event in (events.update_begins, events.values_read):
            if hear not in event:
                event.append(hear)

    # Plans and steps

    fixed_by = replan.fixed_by
    replan = replan.replan
    accumulate = accumulate.accumulate
    mean_count = uneven.mean_count
    join = uneven.join

    def concerns(self, model: nn.Module, optimizer: Optimizer) -> bool:
        return self.owned.adopted(optimizer) or self.owned.concerns(optimizer)

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.owned.adopt_on_all_ranks(optimizer)

    def allocate_states(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.owned.streamed.allocate_others(optimizer)

    def showing_parameters(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        return self.owned.showing_parameters(optimizer) if self.owned.adopted(optimizer) else nullcontext()

    def announce_loss(self, model: nn.Module, loss: Tensor) -> None:
        self.core.announce_loss(loss)

    def settle(self, model: nn.Module) -> None:
        self.core.wait_gathers()

    def replayed_calls(self, model: nn.Module) -> tuple[int, int]:
        return (0, 0) if self.graphs is None else (self.graphs.num_calls, self.graphs.num_replayed)

    def omit_memory_advice(self, model: nn.Module) -> None:
        self.predicts_alone = False

    # Weights

    edit = slices.edit
    whole = whole_parameters.whole
    weight_stream = weight_stream.weight_stream
    full_state_dict = full_state.full_state_dict
    load_full_state_dict = full_state.load_full_state_dict

    # Gradients

    clip_grad_norm_ = grad_norms.clip_grad_norm_
    clip_grad_value_ = grad_norms.clip_grad_value_
    grad_norms = grad_norms.grad_norms

    def buckets(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the buckets of the program; the spec has the order of units that the first step has learned."""
        return {bucket.name: bucket.units for bucket in self.core.cursor.program.buckets}
