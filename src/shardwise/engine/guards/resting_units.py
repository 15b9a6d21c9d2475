"""Guards the parameters of units that are freed or being gathered, or whose gradients are sharded.

Without it a read ends as guard.py says, and a write to gathered parameters is lost with the next gather, with no error.
Since 2c1f55bf, writes since 4dd9739b (random compositions).
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_errors import called_in_transform, forward_called_directly
from shardwise.engine.core.step_events import StepEvents
from shardwise.engine.core.unit import Unit
from shardwise.engine.guards.guard import ShardedParameter, refuse, rest, runs_forward_of, wake
from shardwise.engine.hooks.step_hooks import transforming


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
