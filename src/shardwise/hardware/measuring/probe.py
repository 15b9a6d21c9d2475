"""The probes of `calibrate`: kernels by name, dtype and size. No torch here.

name                            dims
matmul                          m, n, k; `role`: forward (x · Wᵀ + b), input (gradient of x), weight (gradient of W);
                                in fp8 of operands that are cast already; `ROLE rowwise`: with a scale for each row of
                                the left and each column of the right one, instead of one for each operand
attention[_backward]            batch, heads, heads of keys, length, width of a head; `role`: causal or full
convolution[_backward]          batch, channels in, channels out, size of kernel, stride, height and width of the image
batch_norm, max_pool            batch, channels, height and width
all others                      rows, columns

widen and narrow are casts to and from fp32; stack and transpose copy strided tensors, as backward of attention does.
strided is elementwise on operands of different layouts, as in a rotary embedding; strided_cat joins its halves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})

PASSES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("fill", "column_sum", "nll_loss_backward", "embedding_backward"), 1)
    | dict.fromkeys(("copy", "transpose", "stack", "cat", "embedding", "dropout", "dropout_backward"), 2)
    | dict.fromkeys(("gelu", "silu", "relu", "layer_norm", "rms_norm", "batch_norm", "log_softmax"), 2)
    | dict.fromkeys(("gelu_backward", "silu_backward", "relu_backward", "layer_norm_backward"), 3)
    | dict.fromkeys(("rms_norm_backward", "batch_norm_backward", "log_softmax_backward", "add", "mul"), 3)
)
"""Memory-bound kernel → how often it reads or writes its tensor, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kernel at one size. `cold`: its inputs are not in the device's cache."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    role: str = ""
    cold: bool = True

    @property
    def is_backward(self) -> bool:
        return self.name.endswith("_backward")

    @property
    def num_flops(self) -> int:
        """Operations as the trace counts them: of causal attention only the half that is computed."""
        match self.name.removesuffix("_backward"), self.dims:
            case "matmul", (m, n, k):
                return 2 * m * n * k
            case "attention", (batch, heads, _, seq, width):
                products = 5 if self.is_backward else 2
                return products * 2 * batch * heads * seq * seq * width // (2 if self.role == "causal" else 1)
            case "convolution", (batch, inputs, outputs, kernel, stride, image):
                side = -(-image // stride)
                # The gradients of the weight and of the input, which a model's first convolution does not need.
                times = (1 if inputs == 3 else 2) if self.is_backward else 1
                return times * 2 * batch * inputs * outputs * kernel * kernel * side * side
        return 0

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read and written at least."""
        size = ELEMENT_BYTES[self.dtype]
        match self.name.removesuffix("_backward"), self.dims:
            case "matmul", (m, n, k):
                # A product in fp8 has a result in bf16.
                return size * (m * k + n * k) + max(size, 2) * m * n
            case "attention", (batch, heads, kv_heads, seq, width):
                each = 4 if self.is_backward else 2
                return size * each * batch * seq * width * (heads + kv_heads)
            case "convolution", (batch, inputs, outputs, kernel, stride, image):
                read, written = batch * inputs * image**2, batch * outputs * (-(-image // stride)) ** 2
                weight = inputs * outputs * kernel * kernel
                if not self.is_backward:
                    return size * (read + written + weight)
                return size * ((1 if inputs == 3 else 2) * read + written + 2 * weight)
            case "embedding", (rows, columns) if self.is_backward:
                # Read the gradient, and write a table with as many rows.
                return 2 * size * rows * columns
            case (("widen" | "narrow"), (rows, columns)):
                return 6 * rows * columns
            case (("strided" | "strided_cat"), (rows, columns)):
                # Their time depends on the elements, not on the dtype (kernel_model.strided).
                return 4 * rows * columns
            case "nll_loss", (rows, _) if not self.is_backward:
                return size * rows
            case "max_pool", (batch, channels, image):
                # The output is a quarter as large, with an index of 8 bytes per value.
                return int(batch * channels * image * image * (size * (2.25 if self.is_backward else 1.25) + 2))
            case "batch_norm", (batch, channels, image):
                return PASSES[self.name] * size * batch * channels * image * image
        rows, columns = self.dims
        return PASSES[self.name] * size * rows * columns

    def row(self, *, seconds: float) -> dict[str, Any]:
        return asdict(self) | {"dims": list(self.dims), "seconds": seconds}


def probe_of(row: Mapping[str, Any]) -> Probe:
    """Return the probe of a row that `Probe.row` made."""
    return Probe(
        name=row["name"], dtype=row["dtype"], dims=tuple(row["dims"]), role=row["role"], cold=row.get("cold", True)
    )


def cuda_probes() -> list[Probe]:
    """Return the probes for a GPU: sizes of transformers with 100 million parameters or more, and of ResNet-50."""
    return [
        *_linears(widths=(768, 1024, 2048, 4096), tokens=(4096, 16_384), dtype="bf16"),
        *_linears(widths=(1024,), tokens=(3152, 1024, 256), dtype="bf16"),
        *_linear(2048, 512, tokens=4096, dtype="bf16"),
        *(probe for width in (768, 2048) for probe in _linear(width, 50_257, tokens=4096, dtype="bf16")),
        # Rows that begin at multiples of 2 and of 4 values.
        *(
            probe
            for width in (2048, 768)
            for outputs in (50_258, 50_260)
            for probe in _linear(width, outputs, tokens=4096, dtype="bf16")
        ),
        *_linear(2048, 128_256, tokens=4096, dtype="bf16"),
        *_linear(1600, 6400, tokens=4096, dtype="bf16"),
        *(Probe(name="matmul", dtype="bf16", dims=(8192, 8192, 8192), role=role) for role in ROLES),
        *_linears(widths=(768, 2048), tokens=(4096,), dtype="fp32"),
        *_linears(widths=(2048,), tokens=(4096,), dtype="fp16"),
        *_linears(widths=(2048, 4096), tokens=(4096, 16_384), dtype="fp8"),
        *_fp8_linears(),
        *_attentions(),
        *_memory_curve(largest=2**30),
        *_rowwise(rows=16_384, columns=(768, 1024, 2048, 4096, 8192)),
        *_rowwise(rows=4096, columns=(768, 1024, 2048, 4096, 8192)),
        # Norms of single heads.
        *(
            Probe(name="column_sum", dtype="bf16", dims=dims)
            for columns, num_rows in ((128, (4096, 16_384, 65_536, 262_144)), (64, (16_384, 131_072)), (256, (16_384,)))
            for dims in ((rows, columns) for rows in num_rows)
        ),
        *_losses(rows=4096, columns=50_257),
        *_losses(rows=16_384, columns=50_257),
        *_convolutions(batches=(32, 128)),
    ]


def cpu_probes() -> list[Probe]:
    """Return the probes for a CPU: sizes of small models."""
    return [
        *_linears(widths=(64, 256), tokens=(64, 512), dtype="fp32"),
        *_pair("attention", "fp32", (2, 4, 4, 64, 32), role="causal"),
        *_pair("attention", "fp32", (16, 4, 4, 64, 32), role="full"),
        *_memory_curve(largest=2**24, step=8, dtype="fp32"),
        *_rowwise(rows=512, columns=(64, 256), dtype="fp32"),
        *_losses(rows=512, columns=256),
        *(probe for batch in (8, 64) for probe in _pair("convolution", "fp32", (batch, 16, 16, 3, 1, 8))),
    ]


ROLES = ("forward", "input", "weight")


def _linear(inputs: int, outputs: int, *, tokens: int, dtype: str) -> Iterator[Probe]:
    """Yield the three matrix products of a linear layer in a training step."""
    sizes = ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens))
    for role, dims in zip(ROLES, sizes, strict=True):
        yield Probe(name="matmul", dtype=dtype, dims=dims, role=role)


def _linears(*, widths: tuple[int, ...], tokens: tuple[int, ...], dtype: str) -> Iterator[Probe]:
    """Yield the four linear layers of a transformer block."""
    for width in widths:
        for inputs, outputs in ((width, width), (width, 3 * width), (width, 4 * width), (4 * width, width)):
            for number in tokens:
                yield from _linear(inputs, outputs, tokens=number, dtype=dtype)


def _fp8_linears() -> Iterator[Probe]:
    """Yield the layers of Llama models in fp8 with both kinds of scales."""
    layers = ((2048, 2048), (2048, 8192), (8192, 2048), (4096, 1024), (4096, 4096), (4096, 14_336), (14_336, 4096))
    for inputs, outputs in layers:
        for probe in _linear(inputs, outputs, tokens=8192, dtype="fp8"):
            yield probe
            yield replace(probe, role=f"{probe.role} rowwise")


def _pair(name: str, dtype: str, dims: tuple[int, ...], *, role: str = "") -> Iterator[Probe]:
    yield Probe(name=name, dtype=dtype, dims=dims, role=role)
    yield Probe(name=f"{name}_backward", dtype=dtype, dims=dims, role=role)


def _attentions() -> Iterator[Probe]:
    for heads, kv_heads, width in ((12, 12, 64), (16, 16, 128), (32, 8, 64), (32, 8, 128)):
        for batch, seq in ((4, 1024), (16, 1024), (2, 2048), (8, 2048), (1, 8192)):
            yield from _pair("attention", "bf16", (batch, heads, kv_heads, seq, width), role="causal")
    for batch in (16, 64):
        yield from _pair("attention", "bf16", (batch, 16, 16, 197, 64), role="full")
    yield from _pair("attention", "bf16", (4, 16, 16, 1024, 64), role="full")
    yield from _pair("attention", "fp32", (4, 12, 12, 1024, 64), role="causal")


def _memory_curve(*, largest: int, step: int = 4, dtype: str = "bf16") -> Iterator[Probe]:
    """Yield copies and sums from 16 KiB up, of data that is in the cache and of data that is not."""
    num_bytes, columns = 2**14, 1024
    while num_bytes <= largest:
        dims = (max(num_bytes // columns // ELEMENT_BYTES[dtype], 1), columns)
        for name in ("copy", "add"):
            for cold in (True, False):
                yield Probe(name=name, dtype=dtype, dims=dims, cold=cold)
        num_bytes *= step


def _rowwise(*, rows: int, columns: tuple[int, ...], dtype: str = "bf16") -> Iterator[Probe]:
    """Yield the kernels between matrix products."""
    for number in columns:
        for name in ("layer_norm", "rms_norm", "gelu", "silu", "relu", "dropout", "embedding"):
            yield from _pair(name, dtype, (rows, number))
        for name in ("add", "mul", "transpose", "stack", "cat", "strided", "strided_cat", "column_sum", "fill"):
            yield Probe(name=name, dtype=dtype, dims=(rows, number))
        for name in ("widen", "narrow"):
            yield Probe(name=name, dtype="bf16", dims=(rows, number))


def _losses(*, rows: int, columns: int) -> Iterator[Probe]:
    for name in ("log_softmax", "nll_loss"):
        yield from _pair(name, "fp32", (rows, columns))
    for name in ("widen", "narrow"):
        yield Probe(name=name, dtype="bf16", dims=(rows, columns))


def _convolutions(*, batches: tuple[int, ...]) -> Iterator[Probe]:
    """Yield the convolutions, norms and pooling of ResNet-50, and the patches of a ViT."""
    for batch in batches:
        for shape in (
            (3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
            (128, 128, 3, 2, 56), (128, 128, 3, 1, 28), (128, 512, 1, 1, 28), (512, 128, 1, 1, 28),
            (512, 1024, 1, 2, 28), (256, 256, 3, 1, 14), (256, 1024, 1, 1, 14), (1024, 256, 1, 1, 14),
            (512, 512, 3, 1, 7), (2048, 512, 1, 1, 7),
        ):  # fmt: skip
            yield from _pair("convolution", "bf16", (batch, *shape))
        for channels, image in ((64, 112), (256, 56), (128, 28), (1024, 14), (512, 7)):
            yield from _pair("batch_norm", "bf16", (batch, channels, image))
        yield from _pair("max_pool", "bf16", (batch, 64, 112))
    yield from _pair("convolution", "bf16", (64, 3, 1024, 16, 16, 224))
