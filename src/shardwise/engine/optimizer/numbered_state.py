"""State dicts of an optimizer in torch's format: states of full tensors, by number of the parameter."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def numbered_state(
    optimizer: Optimizer, *, states: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the optimizer's state dict, with `states` (by full name) instead of those of its slices.

    names   for each param group, all its parameters, including those that this rank owns no part of
    """
    state = type(optimizer).state_dict(optimizer)
    groups = numbered(names)
    of_none = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    state["state"] = {n: states[name] for group in groups for n, name in group.items() if name in states} | of_none
    for group, numbers in zip(state["param_groups"], groups, strict=True):
        group["params"] = list(numbers)
    return state


def load_numbered(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    states: Mapping[str, Any],
    own: Mapping[Any, Any],
    names: Sequence[Sequence[str]],
) -> None:
    """Load a state dict of full tensors.

    states   its states by full name; other keys belong to no parameter
    own      this rank's part of them, by the parameter in its groups
    """
    groups = numbered([group["params"] for group in optimizer.param_groups])
    known = {name for group in names for name in group}
    local: dict[str, Any] = {
        **state_dict,
        "state": {n: own[p] for group in groups for n, p in group.items() if p in own}
        | {key: value for key, value in states.items() if key not in known},
        "param_groups": [
            {**saved, "params": list(numbers)}
            for saved, numbers in zip(state_dict["param_groups"], groups, strict=True)
        ],
    }
    type(optimizer).load_state_dict(optimizer, local)


def numbered(groups: Iterable[Sequence[Any]]) -> list[dict[int, Any]]:
    """Number the members of all groups consecutively, as torch's state dicts do."""
    count = itertools.count()
    return [{next(count): member for member in group} for group in groups]
