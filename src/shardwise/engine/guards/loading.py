"""`load_state_dict` of a module inside the model whose parameters are copies of the master in another dtype.

torch copies each value into the parameter; these hooks first copy it into the master, in full precision.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.engine.core.flat import FlatParams
from shardwise.plan.placement import SHARDED


def attach_loads(model: nn.Module, *, flats: Iterable[FlatParams]) -> list[Any]:
    """Register hooks on the modules whose parameters are such copies. Returns their handles."""
    copied = [flat for flat in flats if flat.placement.params is not SHARDED and not flat.aliased]
    places = {id(parameter): (flat, index) for flat in copied for index, parameter in enumerate(flat.params)}
    return [
        module.register_load_state_dict_pre_hook(partial(_fill, places))  # type: ignore[no-untyped-call]
        for module in model.modules()
        if any(id(parameter) in places for parameter in module._parameters.values())
    ]


def _fill(
    places: Mapping[int, tuple[FlatParams, int]], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if id(parameter) not in places or not isinstance(value, Tensor):
            continue
        flat, index = places[id(parameter)]
        # torch raises an error for another shape.
        if value.shape == flat.layout.shapes[index]:
            flat.wait_gather()
            flat.fill(index, value)
