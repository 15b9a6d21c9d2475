"""A model without torch: its units and the bytes of each, for pictures.

One parameter (and one buffer, if the unit has any) stands for all parameters of a unit.
"""

from collections.abc import Mapping

from shardwise.models.shapes import ResNetShape, Shape, num_conv_params
from shardwise.spec import ROOT, ModelSpec, TensorSpec, UnitSpec


def picture_model(*, num_blocks: int = 3) -> ModelSpec:
    """Return a model whose units have 4 Mi parameters each, 16 MiB in fp32, so that the numbers are easy to follow."""
    names = (ROOT, *(f"blocks.{index}" for index in range(num_blocks)))
    return _spec("picture", num_params=dict.fromkeys(names, 4 * 2**20), buffer_bytes={})


def outline(shape: Shape, *, name: str) -> ModelSpec:
    """Return a catalogue model, cut into the units of the policy `auto`."""
    buffer_bytes = {}
    if isinstance(shape, ResNetShape):
        convolutions = shape.convolutions()
        blocks = {unit: num_conv_params(inside) for unit, inside in convolutions.items()}
        # A norm keeps a mean and a variance per channel in fp32, and an int64 count.
        buffer_bytes = {unit: sum(8 * outputs + 8 for _, outputs, _ in inside) for unit, inside in convolutions.items()}
        buffer_bytes[ROOT] = 8 * shape.width + 8
    else:
        blocks = {f"blocks.{index}": shape.num_block_params for index in range(shape.num_layers)}
    at_root = shape.num_held - sum(blocks.values())
    return _spec(name, num_params={ROOT: at_root, **blocks}, buffer_bytes=buffer_bytes)


def _spec(name: str, *, num_params: Mapping[str, int], buffer_bytes: Mapping[str, int]) -> ModelSpec:
    units = []
    for unit, count in num_params.items():
        params = (TensorSpec(name=f"{unit}.params", shape=(count,)),)
        size = buffer_bytes.get(unit, 0)
        buffer = TensorSpec(name=f"{unit}.buffers", shape=(size,), dtype="uint8", trainable=False)
        units.append(UnitSpec(name=unit, class_name="Outline", params=params, buffers=(buffer,) if size else ()))
    return ModelSpec(name=name, units=tuple(units), call_order=tuple(num_params))
