"""Our engine: its methods, most of which are the functions that do the work (prepared/, plan_change/)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import EngineParts
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


class Engine(EngineParts):
    """The engine of a model that runs step programs. torch's engine has the same methods (torch_engine/)."""

    @property
    def plan(self) -> Plan:
        return self.core.followed.plan

    @property
    def bare(self) -> nn.Module:
        """The user's own module, without a wrapper."""
        return self.core.model

    # State

    held = slices.held
    slices_filled = slices.slices_filled
    group_names = slices.group_names
    held_tensors = inventory.held_tensors

    def check_values(self, *, what: str) -> None:
        """Raise if the model temporarily has other values than its trained ones (`ema.applied()`)."""
        self.core.setting.passes.check_values(what)

    def listen_to_writes(self, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        """Call `hear` from now on before the state is written. A second time, and under a new plan, it counts once."""
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

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model."""
        return self.owned.adopted(optimizer) or self.owned.concerns(optimizer)

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer that was created after `prepare` step what this rank owns. Collective."""
        self.owned.adopt_on_all_ranks(optimizer)

    def allocate_states(self, optimizer: Optimizer) -> None:
        """Allocate the state that the first update of an adopted optimizer would allocate, where it is known."""
        self.owned.streamed.allocate_others(optimizer)

    def showing_parameters(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Show the model's own parameters in an optimizer's param groups, which may be changed in the block."""
        return self.owned.showing_parameters(optimizer) if self.owned.adopted(optimizer) else nullcontext()

    def announce_loss(self, loss: Tensor) -> None:
        """Let the next backward begin at a loss that has parameters which the model's forward does not use."""
        self.core.announce_loss(loss)

    def settle(self) -> None:
        """Wait for the collectives that a step has left in flight."""
        self.core.wait_gathers()

    def replayed_calls(self) -> tuple[int, int]:
        """Return how many calls of units there were so far, and how many of them were replays of graphs."""
        return (0, 0) if self.graphs is None else (self.graphs.num_calls, self.graphs.num_replayed)

    def buckets(self) -> dict[str, tuple[str, ...]]:
        """Return the units of each bucket by its name; the spec has the order that the first step has learned."""
        return {bucket.name: bucket.units for bucket in self.core.cursor.program.buckets}

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
