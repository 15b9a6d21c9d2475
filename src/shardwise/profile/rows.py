"""Marks where the step program has its rows, and what the engine holds at each.

The hooks are the model's own, and run before those of the engine, so a mark stands at the very beginning of its row;
they are the same for our engine and for torch's. Under `fully_shard` a gradient comes to its parameter when it is
reduced, and not when it is there, so `grads ready` rows are missing: what happens then is in the row before.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.categories import ACTIVATIONS, GRADS, HOST, OPTIM, OTHER, PARAMS
from shardwise.comm.dtensor import dtensor_types, local_part
from shardwise.engine.engine import is_prepared
from shardwise.engine.inventory import held_tensors
from shardwise.program import Trigger
from shardwise.spec import ROOT, ModelSpec

OnRow = Callable[[Trigger, str], None]


@contextmanager
def step_rows(
    optimizer: Optimizer, *, spec: ModelSpec, modules: Mapping[str, nn.Module], on_row: OnRow
) -> Iterator[None]:
    """Call `on_row(trigger, unit)` at the beginning of each row of the steps inside the context.

    `modules` are the units' own, by name, not what an engine may have put around them; they and `spec` are from before
    `prepare`. To be entered after it and before the first forward: hooks of gradients run in the order in which they
    came.
    """
    rows = _Rows(on_row)
    handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: on_row(Trigger.AFTER_STEP, ROOT))]
    # An engine that puts a module of its own around each unit changes the names, and has parameters of its own as well.
    parameters = dict(modules[ROOT].named_parameters())
    for unit in spec.units:
        module = modules[unit.name]
        handles.append(module.register_forward_pre_hook(partial(rows.before_forward, unit.name), prepend=True))
        handles.append(module.register_forward_hook(partial(rows.after_forward, unit.name), prepend=True))
        names = [param.name for param in unit.params if param.trainable]
        trained = [parameters[name] for name in names if name in parameters]
        if len(trained) < len(names) or any(isinstance(parameter, dtensor_types()) for parameter in trained):
            continue
        rows.num_grads[unit.name] = len(trained)
        for parameter in trained:
            hook = partial(rows.grad_arrived, unit.name)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Rows:
    """How far a step has come."""

    def __init__(self, on_row: OnRow) -> None:
        self.on_row = on_row
        self.num_grads: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._begun: set[tuple[str, int]] = set()
        self._calls: dict[str, int] = {}
        self._in_backward = False

    def before_forward(self, name: str, module: nn.Module, inputs: Any) -> None:
        if _recomputing():
            return
        self._calls[name] = self._calls.get(name, -1) + 1
        self.on_row(Trigger.BEFORE_FORWARD, name)

    def after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if _recomputing():
            return
        self.on_row(Trigger.AFTER_FORWARD, name)
        hook = partial(self.before_backward, name, self._calls[name])
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def before_backward(self, name: str, call: int, grad: Tensor) -> None:
        self._begin_backward()
        if (name, call) not in self._begun:
            self._begun.add((name, call))
            self.on_row(Trigger.BEFORE_BACKWARD, name)

    def grad_arrived(self, name: str, parameter: Tensor) -> None:
        self._begin_backward()
        self._arrived[name] = self._arrived.get(name, 0) + 1
        if self._arrived[name] == self.num_grads[name]:
            self.on_row(Trigger.GRADS_READY, name)

    def _begin_backward(self) -> None:
        """The engine's own callback is queued after this one."""
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.on_row(Trigger.BACKWARD_DONE, ROOT)
        self._in_backward = False
        self._calls.clear()
        self._begun.clear()
        self._arrived.clear()


def _recomputing() -> bool:
    """A forward in the middle of backward."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def known_storages(model: nn.Module, optimizer: Optimizer, *, batch: Any) -> dict[int, str]:
    """Address → category of the storages that an engine knows at this moment."""
    known: dict[int, str] = {}
    tensors = held_tensors(model, optimizer) if is_prepared(model) else _held_by_torch(model, optimizer)
    leaves = ((ACTIVATIONS, leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    for category, tensor in (*tensors, *leaves):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            # What a plan offloads is in no category; where the device is the host, it is there all the same.
            known.setdefault(storage.data_ptr(), OTHER if category == HOST else category)
    return known


def _held_by_torch(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """torch's engines: what the optimizer steps, its gradients and its state; their own buffers are not to be found."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        yield PARAMS, local_part(parameter)
        if parameter.grad is not None:
            yield GRADS, local_part(parameter.grad)
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                yield OPTIM, local_part(value)
    for buffer in model.buffers():
        yield OTHER, buffer
