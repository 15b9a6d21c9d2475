"""Which optimizers can step slices, and what ranks compare of theirs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import InvalidPlan, ShardwiseError

# Each element's update depends on that element's gradient and state alone, so a slice can be updated by itself. By
# exact class: a subclass, or another package's class of the same name, may do something else.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# Other packages' classes, by where they are defined: they need not be imported to be known.
ELEMENTWISE_ELSEWHERE = frozenset({"lion_pytorch.lion_pytorch.Lion", "timm.optim.lion.Lion"})

# Options that scale an update by a mean over the parameter, and the value at which they do not.
_PLAIN_OPTIONS = {"caution": False, "cautious": False, "cautious_factor": 1.0}


class StaleOptimizer(ShardwiseError):  # noqa: N818
    """An optimizer whose state belongs to parameters that are no longer there."""


def check_optimizer(optimizer: Optimizer, *, sharded: Mapping[int, bool], any_optimizer: bool) -> None:
    """Refuse an optimizer that cannot step what `sharded` tells, by id: the model's parameters, and which in slices."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        if id(parameter) not in sharded:
            raise InvalidPlan(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's: "
                "give it an optimizer of its own"
            )
    if optimizer.state:
        raise StaleOptimizer(
            "the optimizer has stepped before: hand a fresh one to shardwise.prepare, then load the old state "
            "with its load_state_dict"
        )
    if any_optimizer or not any(sharded[id(p)] for p in held):
        return
    check_elementwise(optimizer)


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step slices."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE and f"{kind.__module__}.{kind.__qualname__}" not in ELEMENTWISE_ELSEWHERE:
        names = sorted({kind.__name__ for kind in ELEMENTWISE} | {"Lion"})
        raise InvalidPlan(
            f"{kind.__module__}.{kind.__qualname__} is not known to update each element by itself, and under this "
            f"plan a rank holds slices: use torch's own {', '.join(names)} (of lion_pytorch or timm), "
            "strategy = 'ddp', or say prepare(…, any_optimizer=True) if it does"
        )
    for group in optimizer.param_groups:
        for option, plain in _PLAIN_OPTIONS.items():
            if group.get(option, plain) != plain:
                raise InvalidPlan(
                    f"{kind.__name__} with {option} = {group[option]} looks at whole parameters, and under this plan "
                    f"a rank holds slices: set {option} = {plain}, or use strategy = 'ddp'"
                )


def describe_optimizer(optimizer: Optimizer, *, names: Mapping[int, str]) -> str:
    """An optimizer, a line each thing that must be equal on all ranks; `names`: of the parameters, by id."""
    kind = type(optimizer)
    lines = [f"optimizer = {kind.__module__}.{kind.__qualname__}"]
    for number, group in enumerate(optimizer.param_groups):
        lines += [
            f"optimizer.param_groups[{number}] {option} = {_shown(value)}"
            for option, value in group.items()
            if option != "params"
        ]
        lines += [f"optimizer.param_groups[{number}] holds {names[id(p)]}" for p in group["params"]]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A value as text that is the same in all processes."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, tuple | list):
        return str([_shown(inner) for inner in value])
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return str(value) if plain else f"{type(value).__module__}.{type(value).__qualname__}"
