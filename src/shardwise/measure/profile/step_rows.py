"""Marks the rows of the step program, and what the engine holds at each.

The hooks are on the model's own modules and run before the engine's, so a mark stands at the very beginning of its row,
for our engine and for torch's. Under `fully_shard` a parameter gets its gradient only when it is reduced, so `grads
ready` rows are missing: their operations count in the row before.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.base.vocabulary.categories import ACTIVATIONS, HOST, OTHER
from shardwise.comm.groups.dtensor import dtensor_types
from shardwise.engine.hooks.step_hooks import StepHooks
from shardwise.engine.torch_engine.plain_model import state_of
from shardwise.program import Trigger
from shardwise.program.spec import ROOT, ModelSpec

OnRow = Callable[[Trigger, str], None]


@contextmanager
def step_rows(
    optimizer: Optimizer, *, spec: ModelSpec, modules: Mapping[str, nn.Module], on_row: OnRow
) -> Iterator[None]:
    """Call `on_row(trigger, unit)` at the beginning of each row of the steps inside the context.

    `spec` and `modules` (the units by name, without an engine's wrappers) are from before `prepare`. Enter it after
    `prepare` and before the first forward, since gradient hooks run in the order in which they were registered.
    """
    hooks = StepHooks({unit.name: modules[unit.name] for unit in spec.units}, listener=_Rows(on_row))
    hooks.attach(first=True)
    # An engine that wraps each unit changes the names and the parameters.
    parameters = dict(modules[ROOT].named_parameters())
    for unit in spec.units:
        names = [param.name for param in unit.params if param.trainable]
        trained = [parameters[name] for name in names if name in parameters]
        if len(trained) == len(names) and not any(isinstance(parameter, dtensor_types()) for parameter in trained):
            hooks.grads[unit.name].expect(trained)
    update = optimizer.register_step_pre_hook(lambda *_: on_row(Trigger.AFTER_STEP, ROOT))
    try:
        yield
    finally:
        update.remove()
        hooks.detach()


class _Rows:
    """Listens to the hooks. The engine's own end of backward is queued after this one's."""

    in_backward = False

    def __init__(self, on_row: OnRow) -> None:
        self.on_row = on_row
        self._calls: Counter[str] = Counter()

    def before_forward(self, unit: str) -> int:
        self.on_row(Trigger.BEFORE_FORWARD, unit)
        self._calls[unit] += 1
        return self._calls[unit] - 1

    def awaits(self, unit: str) -> bool:
        return True

    def after_forward(self, unit: str, *, backward: str) -> None:
        self.on_row(Trigger.AFTER_FORWARD, unit)

    def begin_backward(self) -> None:
        self.in_backward = True

    def before_graph_of_grads(self) -> None: ...

    def before_backward(self, unit: str, call: int) -> None:
        self.on_row(Trigger.BEFORE_BACKWARD, unit)

    def grads_ready(self, unit: str) -> None:
        self.on_row(Trigger.GRADS_READY, unit)

    def end_backward(self) -> None:
        self.in_backward = False
        self.on_row(Trigger.BACKWARD_DONE, ROOT)
        self._calls.clear()

    def recompute(self, unit: str) -> None: ...

    def without_gradients(self, unit: str, *, begins: bool) -> None: ...


@torch.no_grad()
def known_storages(model: nn.Module, optimizer: Optimizer, *, batch: Any) -> dict[int, str]:
    """Return address → category of the storages that an engine knows now."""
    known: dict[int, str] = {}
    tensors = state_of(model).held_tensors(optimizer)
    leaves = ((ACTIVATIONS, leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    for category, tensor in (*tensors, *leaves):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            # Offloaded tensors have no category, but count if the device is the host.
            known.setdefault(storage.data_ptr(), OTHER if category == HOST else category)
    return known
