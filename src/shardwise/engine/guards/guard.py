"""Parameters that raise an error when they are read at the wrong time, instead of a crash or a wrong number.

While a parameter's storage is freed, a read would access freed memory; while its gradient is sharded, `p.grad` would be
None; while it is gathered after an update, some of its elements are old and some new. So a resting parameter has a
class in front of its own that intercepts reads of its values and its gradient, not of its shape, dtype, device and the
like. While its unit computes, it is of its own class alone: nn.Parameter, or a subclass.

Without it such a read ends in a segmentation fault, or in old numbers without an error, and a write to gathered
parameters is lost with the next gather, with no error. Since 2c1f55bf (the first engine), writes since 4dd9739b (random
compositions).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from shardwise.base.errors import ShardwiseError
from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass, save_to_state_dict
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_errors import called_in_transform, forward_called_directly
from shardwise.engine.core.step_events import StepEvents
from shardwise.engine.core.unit import Unit
from shardwise.engine.hooks.step_hooks import transforming


class ShardedParameter(ShardwiseError):  # noqa: N818
    """A parameter or gradient was read that this rank holds only a slice of."""


# Names of the functions and property getters in __torch_function__ that read neither values nor the gradient.
_ABOUT_THE_PARAMETER = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_meta", "is_cuda", "is_cpu",
        "is_sparse", "is_quantized", "is_nested", "is_complex", "is_floating_point", "is_contiguous", "retains_grad",
        "grad_fn", "output_nr", "names", "name", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
        "dim", "size", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__", "__hash__",
        "itemsize", "nbytes", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device",
        "is_signed", "is_inference", "is_conj", "is_neg", "is_mkldnn", "is_xla", "is_shared", "__reduce_ex__",
    }
)  # fmt: skip


_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_SAVES_STATE = save_to_state_dict.__code__


class GuardClasses(dict[type[nn.Parameter], type[nn.Parameter]]):
    """A parameter's own class → that class with a guard in front, by which it stays an instance of its own."""

    def __init__(self, guard: type[nn.Parameter]) -> None:
        super().__init__({nn.Parameter: guard, guard: guard})
        self._guard = guard

    def __missing__(self, own: type[nn.Parameter]) -> type[nn.Parameter]:
        made = type(own.__name__, (self._guard, own), {"__module__": own.__module__, "_own_class": own})
        self[own] = self[made] = made
        return made


class Resting(nn.Parameter):
    """A resting parameter. `_touched(is_grad=…)` is called before a read: it refuses, or makes it readable."""

    _own_class = nn.Parameter

    # Of one that is no prepared model's: nothing.
    _touched: Callable[[bool], None] = staticmethod(lambda is_grad: None)
    _drop_grad: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = _name(function)
        caller = sys._getframe(1).f_code if name == "detach" else None
        refusing: dict[str, Any] = {}
        if name not in _ABOUT_THE_PARAMETER:
            for parameter in _resting((*arguments, *(options or {}).values())):
                if name == "grad" and len(arguments) == 2 and arguments[1] is None:
                    parameter._drop_grad()
                    continue
                try:
                    parameter._touched(name == "grad")
                except ShardedParameter:
                    # A state dict of a part of the model: PEFT reads its names. Whoever reads a value is refused.
                    if caller is not _SAVES_STATE:
                        raise
                    refusing = {"_touched": parameter._touched}
        with DisableTorchFunctionSubclass():
            result = function(*arguments, **(options or {}))
        if refusing or caller is _MAKES_PARAMETER:
            # nn.Parameter(p) wants the class of `p` (weight_norm of a prepared module makes one).
            result.__class__ = type(arguments[0])
            vars(result).update(refusing)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Resting({tuple(self.shape)}, {self.dtype})"


def _resting(arguments: Iterable[Any]) -> Iterator[Resting]:
    """Yield the resting parameters among a function's arguments, also in lists (torch.stack, foreach)."""
    for argument in arguments:
        if isinstance(argument, Resting):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _resting(argument)


def _name(function: Any) -> str:
    """Return `shape` for the getter of Tensor.shape, `add` for Tensor.add."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", ""))
    return str(name)


def refuse(name: str, *, is_grad: bool) -> None:
    """Refuse to read a parameter or gradient of which this rank holds only a slice."""
    if is_grad:
        raise ShardedParameter(
            f"the gradient of {name} is sharded: call shardwise.clip_grad_norm_, clip_grad_value_ or grad_norms with "
            "the model (parameters=… clips some of it); this rank's slices are in optimizer.param_groups"
        )
    raise ShardedParameter(
        f"{name} is sharded and freed: for its values call shardwise.full_state_dict(model), or read it inside `with "
        "shardwise.whole(model):`, on every rank (for an average of the weights there is shardwise.EMA); this rank's "
        "slices are in optimizer.param_groups"
    )


def runs_forward_of(module: nn.Module) -> bool:
    """Return whether the caller runs inside this module's forward."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            return True
    return False


_AT_REST = GuardClasses(Resting)


def rest(parameters: Iterable[nn.Parameter]) -> None:
    """Intercept reads of these parameters."""
    for parameter in parameters:
        parameter.__class__ = _AT_REST[type(parameter)]


def wake(parameters: Iterable[nn.Parameter]) -> None:
    """Give these parameters their own class again."""
    for parameter in parameters:
        parameter.__class__ = getattr(type(parameter), "_own_class", type(parameter))


def guard_units(events: StepEvents) -> None:
    """Intercept reads of the parameters of resting units, and refuse writes to those of sharded units at work."""
    events.unit_settled.append(_guard)
    writes = _LostWrites()
    events.unit_rests.append(writes.rest)
    events.unit_wakes.append(writes.wake)
    events.values_replaced.append(writes.forget)


class _LostWrites:
    """Writes to parameters while they are gathered: the next gather would bring the old values back."""

    def __init__(self) -> None:
        # Unit → how often torch has counted a write to each of its parameters when they were gathered.
        self._counts: dict[Unit, list[int]] = {}

    def wake(self, unit: Unit) -> None:
        wake(unit.settled)
        if unit.sharded:
            self._counts[unit] = [parameter._version for parameter in unit.settled]

    def forget(self) -> None:
        """The engine itself replaces the values."""
        self._counts.clear()

    def rest(self, unit: Unit, parameters: Sequence[nn.Parameter]) -> None:
        # Before a parameter at rest is refused to whoever looks at it.
        self._check(unit)
        rest(parameters)

    def _check(self, unit: Unit) -> None:
        """Refuse what was written since."""
        before = self._counts.pop(unit, None)
        if before is None or before == [parameter._version for parameter in unit.settled]:
            return
        names = [name for flat in unit.flats for name in flat.names]
        counts = zip(names, unit.settled, before, strict=True)
        name = next(name for name, parameter, count in counts if parameter._version != count)
        raise ShardedParameter(
            f"{name} was written while it was gathered, in a forward or between a forward and its backward, and is "
            "sharded, so that the write is lost: write between steps, inside `with shardwise.whole(model, write=True):`"
        )


def _guard(unit: Unit) -> None:
    for flat in unit.flats:
        for index, (parameter, name) in enumerate(zip(flat.params, flat.names, strict=True)):
            parameter._touched = partial(_touched, unit, flat, name)  # type: ignore[attr-defined]
            parameter._drop_grad = partial(flat.grads.drop, {index})  # type: ignore[attr-defined]


def _touched(unit: Unit, flat: FlatParams, name: str, is_grad: bool) -> None:
    """Refuse a read of a resting parameter, or make it readable."""
    if is_grad:
        # Before a backward there is no gradient: None is correct.
        if flat.grads.shows or not any(other.master.has_grads for other in unit.flats):
            return
        refuse(name, is_grad=True)
    if unit.lend():
        return
    if unit.sharded and not unit.whole:
        if transforming():
            raise called_in_transform(name)
        if runs_forward_of(unit.module):
            raise forward_called_directly(unit.name)
        refuse(name, is_grad=False)
    for other in unit.flats:
        other.full.wait()
    # A write through `p.data` would not be counted by torch.
    flat.master.writes.touch()
