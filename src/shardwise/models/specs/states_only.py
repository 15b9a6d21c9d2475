"""The spec of a number of parameters: nothing else is known of the model."""

import re

from shardwise.base.errors import InvalidModel
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# A model of which only its size is known still needs units to shard: equal blocks, and a little at the root.
_NUM_BLOCKS = 40
_ROOT_PART = 50


def states_only(reference: str) -> ModelSpec:
    """Return the spec of a number of parameters: equal blocks, and a fiftieth at the root."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmbt]?)", reference.removeprefix("params:").lower())
    asked = float(found[1]) * _SUFFIXES[found[2]] if found else 0.0
    # A number of a thousand digits is inf, which int() refuses.
    count = int(asked) if asked < 10**15 else 0
    if count <= 0:
        raise InvalidModel(f"{reference[:100]}: must be a number of parameters, such as params:60b or params:350m")
    at_root = count // _ROOT_PART
    in_block = (count - at_root) // _NUM_BLOCKS
    sizes = {ROOT: count - _NUM_BLOCKS * in_block, **{f"blocks.{index}": in_block for index in range(_NUM_BLOCKS)}}
    units = tuple(
        UnitSpec(name=name, class_name="Unknown", params=(TensorSpec(name=f"{name}.params", shape=(size,)),))
        for name, size in sizes.items()
    )
    return ModelSpec(name=reference, units=units, call_order=tuple(sizes))
