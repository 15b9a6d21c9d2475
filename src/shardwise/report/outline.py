"""A model in outline, without torch: its units and the bytes of each, for pictures.

One parameter (and one buffer, where there are any) stands for all those of a unit.
"""

from collections.abc import Mapping

from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, Shape, ViTShape
from shardwise.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

PICTURE = "picture"
"""The name of a model that is only good for being looked at."""


def picture_model(*, num_blocks: int = 3) -> ModelSpec:
    """Units of 4 Mi parameters each, 16 MiB in fp32, so that every number in a picture is easy to follow."""
    names = (ROOT, *(f"blocks.{index}" for index in range(num_blocks)))
    return _spec(PICTURE, num_params=dict.fromkeys(names, 4 * 2**20), buffer_bytes={})


def outline(shape: Shape, *, name: str) -> ModelSpec:
    """A catalogue model, cut into the units of the policy `auto`."""
    if isinstance(shape, ResNetShape):
        num_params, norm_channels = _resnet_blocks(shape)
        num_params = {ROOT: shape.num_params - sum(num_params.values()), **num_params}
        norm_channels = {ROOT: [shape.width], **norm_channels}
        # A norm keeps a mean and a variance per channel in fp32, and an int64 count.
        buffer_bytes = {unit: sum(8 * c + 8 for c in channels) for unit, channels in norm_channels.items()}
        return _spec(name, num_params=num_params, buffer_bytes=buffer_bytes)
    in_block = _block_params(shape)
    blocks = {f"blocks.{index}": in_block for index in range(shape.num_layers)}
    at_root = shape.num_held - shape.num_layers * in_block
    return _spec(name, num_params={ROOT: at_root, **blocks}, buffer_bytes={})


def _block_params(shape: GPTShape | LlamaShape | ViTShape) -> int:
    """The parameters of one block; the terms with L in the formulas of shapes.py."""
    d = shape.width
    if isinstance(shape, LlamaShape):
        kv_width = shape.num_kv_heads * d // shape.num_heads
        return 2 * d * d + 2 * d * kv_width + 3 * d * shape.ffn_width + 2 * d
    return 12 * d * d + 13 * d


def _resnet_blocks(shape: ResNetShape) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Block → its parameters, and the channels of each of its norms, one after every convolution."""
    num_params: dict[str, int] = {}
    norm_channels: dict[str, list[int]] = {}
    inputs = shape.width
    for stage, depth in enumerate(shape.num_blocks):
        inner = shape.width * 2**stage
        outputs = inner * shape.expansion
        for index in range(depth):
            if shape.block == "basic":
                convolutions = [(inputs, inner, 3), (inner, inner, 3)]
            else:
                convolutions = [(inputs, inner, 1), (inner, inner, 3), (inner, outputs, 1)]
            if inputs != outputs:
                convolutions.append((inputs, outputs, 1))
            unit = f"layer{stage + 1}.{index}"
            num_params[unit] = sum(i * o * kernel**2 + 2 * o for i, o, kernel in convolutions)
            norm_channels[unit] = [o for _, o, _ in convolutions]
            inputs = outputs
    return num_params, norm_channels


def _spec(name: str, *, num_params: Mapping[str, int], buffer_bytes: Mapping[str, int]) -> ModelSpec:
    units = []
    for unit, count in num_params.items():
        params = (TensorSpec(name=f"{unit}.params", shape=(count,)),)
        size = buffer_bytes.get(unit, 0)
        buffer = TensorSpec(name=f"{unit}.buffers", shape=(size,), dtype="uint8", trainable=False)
        units.append(UnitSpec(name=unit, class_name="Outline", params=params, buffers=(buffer,) if size else ()))
    return ModelSpec(name=name, units=tuple(units), call_order=tuple(num_params))
