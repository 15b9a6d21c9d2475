"""A parameter or buffer: its name, shape and dtype."""

from dataclasses import dataclass, replace
from math import prod

from shardwise.errors import InvalidModel
from shardwise.vocabulary.dtypes import BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter or buffer.

    name        full path in the model; `aliases`: the other paths of a tied tensor
    trainable   False for buffers and frozen parameters
    switched    frozen or thawed after the model was prepared; the tensor stays in the buffer it was put into then
    persistent  False for buffers that are not saved
    keep_fp32   computes in fp32 under every precision (BatchNorm, whose statistics are fp32)
    linear      the weight of one nn.Linear
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    switched: bool = False
    persistent: bool = True
    keep_fp32: bool = False
    linear: bool = False
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_PER_ELEMENT:
            raise InvalidModel(f"{self.name}: dtype {self.dtype} is not known; known: {', '.join(BYTES_PER_ELEMENT)}")
        if any(size < 0 for size in self.shape):
            raise InvalidModel(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def starts_trainable(self) -> bool:
        """Return whether it was trainable when the model was prepared."""
        return self.trainable != self.switched

    def trained_now(self, trainable: bool) -> "TensorSpec":
        return replace(self, trainable=trainable, switched=trainable != self.starts_trainable)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BYTES_PER_ELEMENT[self.dtype]
