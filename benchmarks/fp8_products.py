"""Single linear layers in fp8 and bf16 on one GPU: `python benchmarks/fp8_products.py [--seconds 45]`.

Forward and backward of one layer with its casts, compiled, between operations into which casts can be fused, replayed
as a CUDA graph. Prints from which size on fp8 gains, by which the default of fp8_min_features is chosen, and writes
benchmarks/results/fp8_products_h200.json.

    gathered      one scale per tensor, with a weight that was gathered in fp8 (fsdp)
    tensorwise    one scale per tensor, and the layer casts its weight (ddp)
    rowwise       one scale per row
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import measuring
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.engine.fp8.casts import E4M3, cast
from shardwise.engine.fp8.linear import GatheredLinear, RowwiseLinear, TensorwiseLinear

LAYERS = [(2048, 512), (1024, 1024), (4096, 1024), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336)]
ROWS = [4096, 16384]
_KINDS = {"bf16": nn.Linear, "gathered": GatheredLinear, "tensorwise": TensorwiseLinear, "rowwise": RowwiseLinear}


def products(*, blocks: int, limit_seconds: float) -> list[dict[str, Any]]:
    """Time forward and backward of one layer, compiled, by shape; those left after the limit are not measured."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for num_rows in ROWS:
        for inputs, outputs in LAYERS:
            if time.monotonic() - began > limit_seconds:
                print(f"left out after {limit_seconds:.0f} s: {inputs} → {outputs}, {num_rows} rows", flush=True)
                continue
            steps = {way: _layer_step(way, inputs=inputs, outputs=outputs, num_rows=num_rows) for way in _KINDS}
            seconds = measuring.in_turn(steps, blocks=blocks, block_seconds=0.02)
            row: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "rows": num_rows}
            row["seconds"] = {way: statistics.median(times) for way, times in seconds.items()}
            rows.append(row)
    return rows


def show_products(rows: list[dict[str, Any]]) -> None:
    """Print the gain of each shape, and from which size on all of them gain."""
    ways = ("gathered", "tensorwise", "rowwise")
    print(f"{'layer':>14} {'rows':>6} {'bf16 µs':>8} " + " ".join(f"{way:>16}" for way in ways))
    for row in sorted(rows, key=lambda row: (_least(row), row["inputs"], row["outputs"], row["rows"])):
        seconds = row["seconds"]
        gains = (f"{1e6 * seconds[way]:8.0f} ({seconds['bf16'] / seconds[way]:4.2f}×)" for way in ways)
        layer = f"{row['inputs']} → {row['outputs']}"
        print(f"{layer:>14} {row['rows']:>6} {1e6 * seconds['bf16']:8.0f} " + " ".join(f"{gain:>16}" for gain in gains))
    for way in ways:
        losing = [_least(row) for row in rows if row["seconds"][way] > row["seconds"]["bf16"]]
        gaining = sorted({_least(row) for row in rows if _least(row) > max(losing, default=0)})
        print(f"{way}: all layers gain with at least {gaining[0] if gaining else '?'} input and output features")


def _least(row: dict[str, Any]) -> int:
    return min(row["inputs"], row["outputs"])


def _layer_step(way: str, *, inputs: int, outputs: int, num_rows: int) -> Callable[[], None]:
    torch._dynamo.reset()
    layer = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
    weight = layer.weight
    layer.__class__ = _KINDS[way]
    if way == "gathered":
        vars(layer)["fp8_weight"], vars(layer)["fp8_inverse"] = cast(weight, dtype=E4M3)
    x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(num_rows, outputs, device="cuda", dtype=torch.bfloat16)

    @torch.compile
    def compute(x: Tensor) -> Tensor:
        return functional.silu(layer(functional.rms_norm(x, (inputs,))))

    def step() -> None:
        x.grad = weight.grad = None
        compute(x).backward(grad)

    # On the stream of the capture: gradients are added up on the stream of the first backward.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    x.grad = weight.grad = None
    with torch.cuda.graph(graph, stream=stream):
        compute(x).backward(grad)
    # The graph reads these tensors, and does not keep them.
    return partial(_replay, graph, (layer, x, grad))


def _replay(graph: torch.cuda.CUDAGraph, held: tuple[Any, ...]) -> None:
    graph.replay()


def main() -> None:
    asked = measuring.options(__doc__, blocks=5, seconds=45.0, out=measuring.RESULTS / "fp8_products_h200.json")
    rows = products(blocks=asked.blocks, limit_seconds=asked.seconds)
    measuring.write(asked.out, {**measuring.circumstances(), "rows": rows})
    show_products(rows)


if __name__ == "__main__":
    main()
