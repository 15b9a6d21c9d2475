"""All guards of one model: they listen to its core, and refuse or repair misuse that would give wrong results.

The core computes the same without them.
"""

from typing import Any

from torch import Tensor

from shardwise.engine.core.core import Core
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.core.step_errors import backward_without_forward
from shardwise.engine.guards.first_inputs import FirstInputs
from shardwise.engine.guards.managed import ManagedParameters
from shardwise.engine.guards.refuse import refuse_wrappers
from shardwise.engine.guards.replicas import Replicas
from shardwise.engine.guards.same_order import OptimizerOptions, SameOrder


class Guards:
    """The guards of a model under one plan.

    managed       finds parameters that were added, moved or written
    replicas      compares replicated memory of the ranks every `compare_every` steps
    same_order    compares the collectives that ranks have issued, and the options of their optimizers
    inputs        compares the ranks' first batches
    """

    def __init__(self, core: Core, *, inputs: FirstInputs, options: OptimizerOptions, compare_every: int) -> None:
        self._core, self._compare_every = core, compare_every
        self._updates_in_backward = core.followed.plan.updates_in_backward
        refuse_wrappers(core.model)
        self.inputs, self.options = inputs, options
        self.same_order = SameOrder(groups=core.setting.groups, options=options)
        self.cover()
        core.executor.flags.carry(self.same_order)
        events = core.setting.events
        events.pass_begins.append(self._begin_pass)
        events.last_backward_begins.append(lambda: inputs.compare() if inputs.compares else None)
        events.evaluation_begins.append(lambda: self.managed.writes.settle())
        events.gradients_asked.append(lambda: self.managed.writes.follow_grads())
        events.update_begins.append(self._begin_update)
        events.values_read.append(lambda announced: self.managed.settle(announced=announced))
        events.values_written.append(lambda: self.managed.writes.settled())
        # Hooks that refuse gradients until the first forward registers those that accept them.
        self._refusals: list[Any] = []

    def cover(self) -> None:
        """Guard the buffers that the core holds now."""
        core = self._core
        self.managed = ManagedParameters(core.model, flats=core.flats)
        self.replicas = Replicas(core.flats, groups=core.setting.groups, every=self._compare_every)

    def resume(self, before: "Guards") -> None:
        """Continue the counts of the previous plan's guards."""
        self.same_order.resume_from(before.same_order)
        self.replicas.resume_from(before.replicas)

    def attach(self) -> list[Any]:
        """Register hooks, which refuse gradients until the first forward. Returns their handles."""
        self.detach()
        with unguarded():
            self._refusals = [
                parameter.register_post_accumulate_grad_hook(_refuse_grad)  # type: ignore[no-untyped-call]
                for flat in self._core.flats
                for parameter in flat.params
                if parameter.requires_grad
            ]
        return self.inputs.watch(self._core.model)

    def detach(self) -> None:
        """Stop refusing gradients."""
        while self._refusals:
            self._refusals.pop().remove()

    def _begin_pass(self, learned: bool) -> None:
        self.detach()
        if self._updates_in_backward:
            # Backward updates, before the optimizer's step would do this.
            self.managed.put_back()
        self.managed.check(thorough=not learned)

    def _begin_update(self) -> None:
        self.same_order.check()
        self.managed.put_back()
        self.managed.writes.before_step()
        self.replicas.count_step()


def _refuse_grad(parameter: Tensor) -> None:
    raise backward_without_forward()
