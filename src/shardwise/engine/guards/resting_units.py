"""Guards the parameters of units that are freed or being gathered, or whose gradients are sharded."""

from functools import partial

from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_errors import forward_called_directly
from shardwise.engine.core.step_events import StepEvents
from shardwise.engine.core.unit import Unit
from shardwise.engine.guards.guard import ShardedParameter, refuse, rest, runs_forward_of, wake
from shardwise.plan.placement import SHARDED


def guard_units(events: StepEvents) -> None:
    """Intercept reads of the parameters of resting units."""
    events.unit_settled.append(_guard)
    events.unit_rests.append(lambda unit, parameters: rest(parameters))
    events.unit_wakes.append(lambda unit: wake(unit.settled))


def _guard(unit: Unit) -> None:
    for flat in unit.flats:
        for index, (parameter, name) in enumerate(zip(flat.params, flat.names, strict=True)):
            parameter._touched = partial(_touched, unit, flat, name)  # type: ignore[attr-defined]
            parameter._drop_grad = partial(flat.drop_grads, {index})  # type: ignore[attr-defined]


def _touched(unit: Unit, flat: FlatParams, name: str, is_grad: bool) -> None:
    """Refuse a read of a resting parameter, or make it readable."""
    if is_grad:
        # Before a backward there is no gradient: None is correct.
        if flat.shows_grads or not any(other.has_grads() for other in unit.flats):
            return
        if unit.placement.grads is SHARDED:
            refuse(name, is_grad=True)
        raise ShardedParameter(
            f"the gradient of {name} is {flat.master_dtype} and not in p.grad of the {flat.full.dtype} parameter: "
            "call shardwise.clip_grad_norm_, clip_grad_value_ or grad_norms with the model; it is in "
            "optimizer.param_groups"
        )
    if unit.sharded and not unit.whole:
        if runs_forward_of(unit.module):
            raise forward_called_directly(unit.name)
        refuse(name, is_grad=False)
    for other in unit.flats:
        other.wait_gather()
    # A write through `p.data` would not be counted by torch.
    flat.touched = True
