"""Our engine by the protocol: most of its methods are the functions that do the work."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import engine_of
from shardwise.engine.plan_change.replan import fixed_by, replan
from shardwise.engine.prepared import accumulate, full_state, grad_norms, slices, uneven, weight_stream
from shardwise.engine.prepared.inventory import held_tensors
from shardwise.engine.prepared.whole_parameters import whole
from shardwise.engine.protocol import TrainingEngine
from shardwise.plan import Plan


class OurEngine(TrainingEngine):
    """The engine that runs step programs. The parts of each model's engine are in engine.py."""

    # State

    def plan_of(self, model: nn.Module) -> Plan:
        return engine_of(model).core.followed.plan

    def bare(self, model: nn.Module) -> nn.Module:
        return model

    held = staticmethod(slices.held)
    slices_filled = staticmethod(slices.slices_filled)
    group_names = staticmethod(slices.group_names)
    held_tensors = staticmethod(held_tensors)

    def check_values(self, model: nn.Module, *, what: str) -> None:
        engine_of(model).core.setting.passes.check_values(what)

    def listen_to_writes(self, model: nn.Module, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        events = engine_of(model).core.setting.events
        for event in (events.update_begins, events.values_read):
            if hear not in event:
                event.append(hear)

    # Plans and steps

    replan = staticmethod(replan)

    def fixed_by(self, model: nn.Module, plan: Plan) -> str:
        return fixed_by(engine_of(model), plan=plan)

    accumulate = staticmethod(accumulate.accumulate)
    mean_count = staticmethod(uneven.mean_count)
    join = staticmethod(uneven.join)

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
        engine_of(model).core.announce_loss(loss)

    def settle(self, model: nn.Module) -> None:
        engine_of(model).core.wait_gathers()

    def replayed_calls(self, model: nn.Module) -> tuple[int, int]:
        graphs = engine_of(model).graphs
        return (0, 0) if graphs is None else (graphs.num_calls, graphs.num_replayed)

    def omit_memory_advice(self, model: nn.Module) -> None:
        engine_of(model).predicts_alone = False

    # Weights

    edit = staticmethod(slices.edit)
    whole = staticmethod(whole)
    weight_stream = staticmethod(weight_stream.weight_stream)
    full_state_dict = staticmethod(full_state.full_state_dict)
    load_full_state_dict = staticmethod(full_state.load_full_state_dict)

    # Gradients

    clip_grad_norm_ = staticmethod(grad_norms.clip_grad_norm_)
    clip_grad_value_ = staticmethod(grad_norms.clip_grad_value_)
    grad_norms = staticmethod(grad_norms.grad_norms)

    def buckets(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the buckets of the program; the spec has the order of units that the first step has learned."""
        return {bucket.name: bucket.units for bucket in engine_of(model).core.cursor.program.buckets}
