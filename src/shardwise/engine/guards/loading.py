"""`load_state_dict` of a module inside the model.

Where its parameters are copies of the master in another dtype, torch copies each value into the parameter; these hooks
first copy it into the master, in full precision. Where they are sharded it is refused before anything is loaded: torch
would fill the buffers, and what is replicated, and only then raise an error of its own.

Without it a load into copies is undone by the next update, and one into sharded parameters is half done when torch
raises. Since f392c2b2 (writes outside of an update).
"""

from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.guards.guard import ShardedParameter


def attach_loads(core: Core) -> list[Any]:
    """Register hooks on the modules with such parameters. Returns their handles."""
    sharded = {id(p) for flat in core.flats if flat.placement.params.is_sharded for p in flat.params}
    copied = [flat for flat in core.flats if not flat.placement.params.is_sharded and not flat.master.aliased]
    places = {id(parameter): (flat, index) for flat in copied for index, parameter in enumerate(flat.params)}
    modules = list(core.model.modules())
    hooks = [
        *((module, partial(_refuse, core, sharded)) for module in modules if _holds(module.parameters(), sharded)),
        *((module, partial(_fill, places)) for module in modules if _holds(module._parameters.values(), places)),
    ]
    return [module.register_load_state_dict_pre_hook(hook) for module, hook in hooks]  # type: ignore[no-untyped-call]


def _holds(parameters: Iterable[nn.Parameter | None], ids: Container[int]) -> bool:
    return any(id(parameter) in ids for parameter in parameters)


def _refuse(
    core: Core, sharded: AbstractSet[int], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """Refuse a load that begins here, or outside of the model; any other was refused where it began."""
    if (prefix and module is not core.model) or core.setting.passes.lent:
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state and id(parameter) in sharded:
            raise ShardedParameter(
                f"load_state_dict of a {'module around' if prefix else type(module).__name__ + ' inside'} the model: "
                f"{name} is sharded; call load_state_dict of the prepared model itself, on every rank, with full names "
                "and strict=False for a part of it"
            )


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
            flat.full.wait()
            flat.fill(index, value)
