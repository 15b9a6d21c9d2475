"""A model's forward and backward → triggers at its units, for a listener.

The engine runs rows at them; the trace and the profile mark where rows begin. There are two hooks per unit, and one per
parameter, since a backward may begin at any of them (a penalty on the weights). All listeners use the same hooks, so
that they see the same rows.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass, disable_dynamo
from shardwise.engine.hooks.left_tensors import PLAIN, Attributes, kept, leaves, own_modules
from shardwise.program.spec import ANNOUNCED, NONE, UNANNOUNCED
from shardwise.program.units import called_modules

UnitT = TypeVar("UnitT", bound=Hashable)
_Heard = TypeVar("_Heard", bound=Hashable, contravariant=True)


class StepListener(Protocol[_Heard]):
    """Receives the events of a step. A forward without gradients, and one that backward repeats, are not part of it."""

    @property
    def in_backward(self) -> bool:
        """Return whether a backward has begun and not ended, or raised."""

    def before_forward(self, unit: _Heard) -> int:
        """Note that a call of the unit begins; return its number among the unit's calls in this step."""

    def awaits(self, unit: _Heard) -> bool:
        """Return whether it needs `before_backward` of the call that ends: only then its outputs are examined."""

    def after_forward(self, unit: _Heard, *, backward: str) -> None:
        """Note that the call ends; `backward`: how it notices its backward (spec.UnitSpec), if that was examined."""

    def begin_backward(self) -> None: ...

    def before_backward(self, unit: _Heard, call: int) -> None:
        """Note that the backward of a call begins."""

    def grads_ready(self, unit: _Heard) -> None:
        """Note that the unit's gradients are complete."""

    def end_backward(self) -> None: ...

    def before_graph_of_grads(self) -> None:
        """Note a backward whose gradients can be differentiated (create_graph=True); it is not part of the step."""

    def recompute(self, unit: _Heard) -> None:
        """Note that backward needs the unit again: for a recomputation, or for another output of a call."""

    def without_gradients(self, unit: _Heard, *, begins: bool) -> None:
        """Note that a forward of the unit under no_grad begins, or ends."""


class UnitGrads(Generic[UnitT]):
    """A unit's gradients in one backward: the parameters that can get one, and those that autograd has come to, by id.

    They are `closed` outside a backward, and as soon as no more are accepted in it.
    """

    __slots__ = ("__weakref__", "_any_frozen", "_begins", "_hooked", "arrived", "closed", "expected", "hooks", "unit")

    def __init__(self, unit: UnitT, *, hooks: "StepHooks[UnitT]") -> None:
        self.unit = unit
        self.hooks = hooks
        self.expected: frozenset[int] = frozenset()
        self.arrived: set[int] = set()
        self.closed = True
        self._any_frozen = False
        self._hooked: set[int] = set()
        self._begins: set[int] = set()

    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        """Expect gradients of these from now on. A parameter gets its hook when it is trained for the first time."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._any_frozen = len(trained) < len(parameters)
        self.expected = frozenset(map(id, trained))
        if self._hooked.issuperset(self.expected):
            return
        for parameter in trained:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                hook = partial(_grad_arrived, weakref.ref(self), id(parameter))
                self.hooks.handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def begin_with_any(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin a backward with any of these gradients before autograd adds it to `p.grad`: one more hook for each."""
        new = [one for one in parameters if one.requires_grad and id(one) not in self._begins]
        self._begins.update(map(id, new))
        hook = partial(_before_grad, weakref.ref(self))
        self.hooks.handles += [parameter.register_hook(hook) for parameter in new]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Accept no more gradients in this backward."""
        self.closed = True

    @property
    def complete(self) -> bool:
        """Return whether all gradients that are expected in this backward have arrived."""
        return len(self.arrived) == len(self.expected)

    @property
    def used(self) -> bool:
        """Return whether backward is done with all parameters: what uses one has run when its gradient arrives."""
        return self.complete and not self._any_frozen


class StepHooks(Generic[UnitT]):
    """The hooks of one model.

    on_grad         is called with every gradient
    on_first_grad   is called with a gradient with which a backward begins: autograd has already added it to `p.grad`
    """

    def __init__(
        self,
        modules: Mapping[UnitT, nn.Module],
        *,
        listener: StepListener[UnitT],
        on_grad: Callable[[UnitT, Tensor], None] | None = None,
        on_first_grad: Callable[[UnitT, Tensor], None] | None = None,
    ) -> None:
        self.modules = modules
        self.listener = listener
        self.on_grad = on_grad
        self.on_first_grad = on_first_grad
        self.grads = {unit: UnitGrads(unit, hooks=self) for unit in modules}
        self.handles: list[Any] = []
        self._root = next(iter(modules))
        # The backward, by torch's number of it, in which a training forward of the whole model runs; -1 outside of one.
        self._task = -1
        self._calls: dict[UnitT, int] = {}
        self._begun: set[tuple[UnitT, int]] = set()

    def attach(self, *, first: bool = False) -> None:
        """Hook every unit's module, before the user's hooks; `first`: also before existing hooks after its forward."""
        of_units = {id(module) for module in self.modules.values()}
        # The root last, so that its hooks are the outermost if one of several models in it is a unit too.
        for unit, module in reversed(list(self.modules.items())):
            before = partial(_before_forward, self, unit)
            attributes = [Attributes(own) for own in own_modules(module, unit_modules=of_units)]
            after = partial(_after_forward, self, unit, attributes)
            for called in called_modules(module):
                self.handles.append(called.register_forward_pre_hook(before, prepend=True))
                self.handles.append(called.register_forward_hook(after, prepend=first))

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for grads in self.grads.values():
            grads._hooked.clear()
            grads._begins.clear()

    def repeats(self, unit: UnitT) -> bool:
        """Return whether a forward of the unit that runs now is a recomputation, and no part of a step.

        A backward in which this model has no part yet may run a training forward of all of it, and a backward inside,
        from a hook: a loss that has cached the gradients of embeddings.
        """
        task = torch_private.current_graph_task_id()
        if unit is self._root and not self.listener.in_backward and torch.is_grad_enabled():
            self._task = task
        return task != -1 and (self.listener.in_backward or task != self._task)

    def begin_forward(self, unit: UnitT) -> None:
        """Begin a call of a unit, with or without gradients."""
        if torch.is_grad_enabled():
            self._calls[unit] = self.listener.before_forward(unit)
        else:
            self.listener.without_gradients(unit, begins=True)

    def announce_outputs(self, output: Any, unit: UnitT) -> str:
        """Announce the backward of the unit's last call by its outputs; return how it will be noticed."""
        backward = NONE
        for leaf in leaves(output):
            if isinstance(leaf, Tensor):
                if leaf.requires_grad:
                    self.announce(leaf, unit)
                    backward = ANNOUNCED if backward is NONE else backward
            elif not isinstance(leaf, PLAIN) and self.grads[unit].expected:
                backward = UNANNOUNCED
        return backward

    def announce(self, tensor: Tensor, unit: UnitT) -> None:
        """Announce the backward of the unit's last call when the gradient of `tensor` arrives.

        Units that pass the same tensor on share one hook, which calls the outermost first.
        """
        calls: list[tuple[UnitT, int]] = []
        announced = tensor.__dict__.setdefault("_shardwise_announces", {})
        node, known = announced.get(self, (None, calls))
        if node is tensor.grad_fn and known:
            calls = known
        else:
            # A tensor that was written into since has another gradient, and needs another hook.
            announced[self] = (tensor.grad_fn, calls)
            tensor.register_hook(partial(_before_backward, self, calls))  # type: ignore[no-untyped-call]
        call = (unit, self._calls[unit])
        if call not in calls:
            calls.insert(0, call)

    def begin_backward(self) -> None:
        self.listener.begin_backward()
        self._begun.clear()
        for grads in self.grads.values():
            grads.arrived.clear()
            grads.closed = False
        torch_private.queue_callback(self._end_backward)

    def _begin_with(self, unit: UnitT, parameter: Tensor) -> None:
        """Begin a backward with a gradient (a penalty on the weights), not at the model's outputs.

        The gradient belongs to this backward, so the listener must not take it for an earlier one.
        """
        # It may be of a class of the engine that guards reads of its gradient.
        with DisableTorchFunctionSubclass():
            if self.on_first_grad is not None:
                self.on_first_grad(unit, parameter)
            grad, parameter.grad = parameter.grad, None
            self.begin_backward()
            parameter.grad = grad

    def _end_backward(self) -> None:
        self.listener.end_backward()
        self.close()

    def close(self) -> None:
        """Accept no more gradients: no backward runs any more."""
        for grads in self.grads.values():
            grads.close()

    def arrived(self, grads: UnitGrads[UnitT], key: int, parameter: Tensor) -> None:
        """Handle a gradient that is the unit's last, or arrives in an unusual way."""
        if not self.listener.in_backward:
            self._begin_with(grads.unit, parameter)
        if key in grads.arrived:
            raise InvalidModel(
                f"a parameter of {grads.unit} got two gradients in one backward, as a reentrant checkpoint gives them: "
                "say use_reentrant=False in torch.utils.checkpoint"
            )
        if grads.closed:
            raise InvalidModel(
                f"a parameter of {grads.unit} got a gradient after the unit's backward was over: it is used outside of "
                "the unit; make the module that uses it the unit (units = 'auto + MODULE')"
            )
        grads.arrived.add(key)
        if self.on_grad is not None and parameter.grad is not None:
            self.on_grad(grads.unit, parameter)
        if grads.complete:
            self.listener.grads_ready(grads.unit)


def announce_also(result: Tensor, *, output: Tensor) -> None:
    """Announce the model's backward by `result` as well, which is computed outside of it from an output and parameters.

    Their gradients arrive before that of the output.
    """
    for hooks, (_, calls) in output.__dict__.get("_shardwise_announces", {}).items():
        result.register_hook(partial(_before_backward_of_root, hooks, calls))  # type: ignore[no-untyped-call]


def recomputing() -> bool:
    """Return whether this thread runs a backward: then a forward is a recomputation."""
    return torch_private.current_graph_task_id() != -1


def transforming() -> bool:
    """Return whether torch.func (vmap, grad, …) transforms what runs: it is not part of a step."""
    return torch_private.peek_interpreter_stack() is not None and torch.is_grad_enabled()


# torch.compile would compile a unit's hooks along with its forward.
@disable_dynamo
def _before_forward(hooks: StepHooks[UnitT], unit: UnitT, module: nn.Module, inputs: Any) -> None:
    if hooks.repeats(unit):
        hooks.listener.recompute(unit)
    elif not transforming():
        hooks.begin_forward(unit)


@disable_dynamo
def _after_forward(
    hooks: StepHooks[UnitT],
    unit: UnitT,
    attributes: list[Attributes],
    module: nn.Module,
    inputs: Any,
    output: Any,
) -> None:
    if hooks.repeats(unit) or transforming():
        return
    if not torch.is_grad_enabled():
        hooks.listener.without_gradients(unit, begins=False)
        return
    if not hooks.listener.awaits(unit):
        hooks.listener.after_forward(unit, backward=ANNOUNCED)
        return
    backward = hooks.announce_outputs(output, unit)
    for value in kept(attributes):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            # The backward of a loss that is fetched from the module begins here, perhaps before the outputs.
            hooks.announce(value, unit)
            backward = ANNOUNCED if backward is NONE else backward
    hooks.listener.after_forward(unit, backward=backward)


def _before_backward_of_root(hooks: StepHooks[UnitT], calls: list[tuple[UnitT, int]], grad: Tensor) -> None:
    own = [call for call in calls if call[0] is hooks._root]
    if own:
        _before_backward(hooks, own, grad)


def _before_backward(hooks: StepHooks[UnitT], calls: list[tuple[UnitT, int]], grad: Tensor) -> None:
    if not hooks.handles:
        # Detached since: the tensor with this hook may live as long as the model (a parameter as an output).
        return
    if not hooks.listener.in_backward:
        if torch.is_grad_enabled():
            hooks.listener.before_graph_of_grads()
            return
        hooks.begin_backward()
    for call in calls:
        if call in hooks._begun:
            # Another output of the same call, or the same call of another forward. The last may be an input that was
            # passed on, and other ranks need not have called the unit.
            if not hooks.grads[call[0]].used:
                hooks.listener.recompute(call[0])
        else:
            hooks._begun.add(call)
            hooks.listener.before_backward(*call)


def _before_grad(held: "weakref.ref[UnitGrads[Any]]", grad: Tensor) -> None:
    grads = held()
    if grads is not None and not grads.hooks.listener.in_backward and not torch.is_grad_enabled():
        grads.hooks.begin_backward()


def _grad_arrived(held: "weakref.ref[UnitGrads[Any]]", key: int, parameter: Tensor) -> None:
    """Count a gradient. Autograd holds this hook where the garbage collector cannot look: it must not hold the unit.

    It is called for every parameter in every backward, so the usual case is handled here. Autograd calls it also where
    a function has returned None as the gradient, and then `p.grad` stays None: no more comes, but it was not used.
    """
    grads = held()
    if grads is None:
        return
    arrived = grads.arrived
    if grads.closed or key in arrived or len(arrived) + 1 >= len(grads.expected) or grads.hooks.on_grad is not None:
        grads.hooks.arrived(grads, key, parameter)
    else:
        arrived.add(key)
