"""Attention, norms and dropout as the fused kernels of a GPU, although the trace runs on fake `cpu` tensors.

On those torch would choose CPU kernels, which save other tensors for backward. SCRATCH holds what an operation
allocates and frees while it runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.models.trace.recorder import OpRecorder, Scratch

# Flash attention has no kernel for wider heads.
_FLASH_MAX_HEAD_WIDTH = 256
# cuDNN's convolutions: bytes of one load, and pixels of the smallest load.
_LOAD_BYTES = 16
_PIXELS_PER_LOAD = 4


class GpuKernels(TorchFunctionMode):
    """Replaces calls of attention, dropout and norms by the kernels of a GPU."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._in_compiled: dict[Any, Callable[..., Tensor]] = {
            F.scaled_dot_product_attention: _attention,
            F.dropout: _dropout,
        }
        self._kernels = {
            **self._in_compiled,
            F.rms_norm: lambda *args, **options: _rms_norm(recorder, *args, **options),
            torch.rms_norm: lambda *args, **options: _rms_norm(recorder, *args, **options),
        }

    @contextmanager
    def in_compiled_code(self) -> Iterator[None]:
        """Inside, norms are left to the compiler, which fuses their operations."""
        before, self._kernels = self._kernels, self._in_compiled
        try:
            yield
        finally:
            self._kernels = before

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._kernels.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run flash attention if possible, else the memory-efficient kernel, else plain matrix products.

    Flash needs 16-bit floats and no mask; the memory-efficient kernel as many heads of keys as of queries
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.dim() == 4 and query.shape[-1] <= _FLASH_MAX_HEAD_WIDTH:
        padded = [_pad(tensor, multiple=8) for tensor in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., : query.shape[-1]]
    if query.dim() == 4 and query.shape[1] == key.shape[1]:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        if attn_mask is not None:
            attn_mask = _bias(attn_mask, query=query, key=key)
        out = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
        return out
    plain = torch.ops.aten._scaled_dot_product_attention_math
    out = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _pad(tensor: Tensor, *, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor, *, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as a bias that is added to the scores, expanded to all heads without copying."""
    if mask.dtype == torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype).masked_fill_(mask, 0.0)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """Run the fused dropout, which saves one byte per element for backward."""
    if p == 0.0 or not training:
        return input
    out: Tensor = torch.ops.aten.native_dropout(input, p, training)[0]
    return input.copy_(out) if inplace else out


def _rms_norm(
    recorder: OpRecorder,
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    out: Tensor = _RmsNorm.apply(input, weight, len(tuple(normalized_shape)), recorder)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    """One kernel, which saves its input, its weight, and one float per row for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int, recorder: OpRecorder) -> Tensor:  # noqa: A002
        with recorder.fused("_fused_rms_norm"):
            out = torch.empty_like(input)
            rstd = input.new_empty(input.shape[:-num_dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        ctx.recorder = recorder
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors  # noqa: A001
        with ctx.recorder.fused("_fused_rms_norm_backward"):
            grad_input = torch.empty_like(input)
            grad_weight = torch.empty_like(weight) if weight is not None else None
        return grad_input, grad_weight, None, None


def _flash_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return its scratch: query gradients are summed in float32; those of shared keys and values exist per head."""
    query, key = args[1], args[2]
    batch, heads, seq, width = query.shape
    scratch = batch * heads * seq * (width + 1) * 4
    if key.shape[1] != heads:
        scratch += 2 * batch * heads * key.shape[2] * width * query.element_size()
    return int(scratch)


def _efficient_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return its scratch: one float per row and the float32 product that it sums; 16-bit gradients in float32."""
    query = args[1]
    sums = (3 if query.element_size() == 2 else 1) * query.numel() * 4
    return int(prod(query.shape[:-1]) * 4 + sums)


def _softmax_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return its scratch: the product of gradient and output before it is summed (SoftMax.cu)."""
    return int(out.numel() * out.element_size())


def _convolution(args: tuple[Any, ...], out: Any) -> int:
    return _channels_last_copies(args[0], out, weight=args[1], stride=args[3], groups=args[8])


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return as much as in forward: the two products run one after the other."""
    return _channels_last_copies(args[1], args[0], weight=args[2], stride=args[4], groups=args[9])


def _channels_last_copies(image: Tensor, result: Tensor, *, weight: Tensor, stride: Sequence[int], groups: int) -> int:
    """Return the bytes that cuDNN copies: its tensor-core kernels need channels last, in loads of 16 bytes.

    Images in that layout need no copy. A 1×1 kernel is a matrix product, if full loads divide its pixels. All others
    copy input, result and weight, as measured on an H200 with torch 2.11 (ResNet-50, bf16).
    """
    if image.dim() != 4 or groups != 1 or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    is_one_pixel = weight.shape[2:].numel() == 1
    if is_one_pixel and prod(stride) == 1 and result.shape[2:].numel() % _PIXELS_PER_LOAD == 0:
        return 0
    size, channels = image.element_size(), image.shape[1]
    padded = -(-channels * size // _LOAD_BYTES) * _LOAD_BYTES // size
    copied = (image.numel() + (0 if is_one_pixel else weight.numel())) // channels * padded
    return (copied + result.numel()) * size


SCRATCH: Mapping[str, Mapping[str, Scratch]] = {
    "cuda": {
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_softmax_backward_data": _softmax_backward,
    },
    # oneDNN's internal copies depend on the processor and are not modelled.
    "cpu": {},
}
"""Device → operation → bytes that it allocates in addition to its results."""

IN_FP32: Mapping[str, Mapping[str, tuple[int, ...]]] = {"cuda": {"native_layer_norm": (1, 2)}, "cpu": {}}
"""Device → operation → its outputs that are always fp32 there: the mean and deviation of a norm."""
