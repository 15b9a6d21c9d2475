"""A frozen base in bitsandbytes' NF4 with double quantisation, for QLoRA.

Every linear layer of the blocks becomes a Linear4bit whose packed weight is on the meta device. Its scales are real on
every rank: rank 0 has their values, which `prepare` broadcasts. Rank 0 reads and quantises each weight twice, once for
the scales and once for the packed bytes that go to the ranks' slices, so that no rank ever holds the base.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.adapted import linears_of_blocks
from shardwise.models.transformers_model import imported

Quantise = Callable[[Tensor], Tensor]


def quantise(model: nn.Module, *, device: torch.device | str, weights: Mapping[str, Tensor]) -> dict[str, Quantise]:
    """Replace the linear layers of an empty model's blocks; return, by a weight's name, what packs its file's tensor.

    On `device`: a GPU takes milliseconds for what takes a CPU seconds. The model is on the meta device. `weights` has
    the tensors of the files by the model's names.
    """
    bitsandbytes = imported("bitsandbytes", needed_for="task.quantize = 'nf4'", extra=None)
    packers: dict[str, Quantise] = {}
    is_source = not dist.is_initialized() or dist.get_rank() == 0
    for path, parent, linear in list(linears_of_blocks(model)):
        name, shape, dtype = f"{path}.weight", linear.weight.shape, linear.weight.dtype
        pack = _packer(bitsandbytes, dtype=dtype, device=device)
        value = weights[name] if is_source and name in weights else torch.zeros(shape)
        packed, state = pack(value)
        setattr(parent, path.rpartition(".")[2], _layer(bitsandbytes, linear, packed=packed, state=state))
        packers[name] = lambda value, pack=pack: pack(value)[0]  # type: ignore[misc]
    if not packers:
        raise InvalidModel(f"task.quantize = 'nf4': {type(model).__name__} has no linear layers in its blocks")
    # PEFT asks for it before it puts adapters around packed layers.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return packers


def _packer(
    bitsandbytes: Any, *, dtype: torch.dtype, device: torch.device | str
) -> Callable[[Tensor], tuple[Tensor, Any]]:
    def pack(value: Tensor) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = bitsandbytes.functional.quantize_4bit(
            value.to(device, dtype), quant_type="nf4", compress_statistics=True
        )
        return found

    return pack


def _layer(bitsandbytes: Any, linear: nn.Linear, *, packed: Tensor, state: Any) -> nn.Module:
    layer: Any = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, quant_type="nf4", device="meta"
    )
    layer.bias = linear.bias
    layer.weight = bitsandbytes.nn.Params4bit(
        packed.to("meta"), requires_grad=False, quant_state=state, quant_type="nf4", module=layer, bnb_quantized=True
    )
    layer.quant_state = state
    # Else the first evaluation on such a CPU puts other bytes, which are not the ranks' slices, in the weight's place.
    layer.support_avx512bf16_for_cpu = False
    return layer  # type: ignore[no-any-return]


class QuantisedWeights(Mapping[str, Tensor]):
    """The tensors of a folder, packed where a packer is given for their name."""

    def __init__(self, weights: Mapping[str, Tensor], *, packers: Mapping[str, Quantise]) -> None:
        self._weights, self._packers = weights, packers

    def __getitem__(self, name: str) -> Tensor:
        value = self._weights[name]
        return self._packers[name](value) if name in self._packers else value

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
