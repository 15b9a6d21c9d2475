"""Memory of one training step of a Vision Transformer: by formula, and measured in a real step.

python scripts/profile_memory.py --model-size all
python scripts/profile_memory.py --model-size large --strategy all --ranks 4

A step is forward, backward and AdamW in float32, as any step after the first. The measured one runs in one
process: on a GPU the allocator is read, on a CPU the storages of all live tensors are counted (what a kernel
allocates and frees within itself is not seen). What a strategy leaves on one of several ranks is by formula.
"""

import argparse
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.models.shapes import ViTShape
from shardwise.plan.placement import SHARDED, STRATEGIES, Placement, Where

SIZES = ("tiny", "small", "base", "large", "huge")
# On a CPU, a size that would take the whole run past this is given by formula only.
CPU_SECONDS = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of one rank: its states, what forward leaves for backward, and the peak over a step."""

    params: int
    grads: int
    optim: int
    gathered: int
    activations: int
    peak: int


def block_params(shape: ViTShape) -> int:
    """Parameters of one block: 12d² + 13d."""
    return 12 * shape.width**2 + 13 * shape.width


def batch_bytes(shape: ViTShape, *, batch_size: int) -> int:
    """Images in float32 and labels in int64."""
    return batch_size * (4 * shape.num_channels * shape.image_size**2 + 8)


def activation_bytes(shape: ViTShape, *, batch_size: int, stream_bytes: int = 4, matmul_bytes: int = 4) -> int:
    """What forward leaves for backward, the batch included.

    B samples of T = patches + 1 tokens, width d, h heads, L blocks, C classes. A number that a norm reads
    has `stream_bytes`, one that a matrix product, the attention or the GELU reads has `matmul_bytes`:
    4 and 4 in float32, 4 and 2 under autocast, 2 and 2 where everything is half precision.

    each block   what the two norms read: 2·stream·BTd, and their means and deviations: 16·BT
                 what qkv and up read: 2·matmul·BTd
                 queries, keys, values: 3·matmul·BTd; mixed values: matmul·BTd; log-sum-exp: 4·BhT
                 what the GELU reads and gives: 8·matmul·BTd
    the end      the last stream: stream·BTd (the norm reads a view of it, and that keeps all of it)
                 that norm's mean and deviation: 8·B; what the head reads: matmul·Bd
                 log-probabilities: 4·BC; the loss and the sum of its weights: 8
    """
    tokens, width = batch_size * (shape.num_patches + 1), shape.width
    block = (2 * stream_bytes + 14 * matmul_bytes) * tokens * width + (16 + 4 * shape.num_heads) * tokens
    end = stream_bytes * tokens * width
    end += batch_size * (8 + matmul_bytes * width + 4 * shape.num_classes) + 8
    return batch_bytes(shape, batch_size=batch_size) + shape.num_layers * block + end


def backward_bytes(shape: ViTShape, *, batch_size: int) -> int:
    """The most that backward holds beside parameters and optimizer state, in float32.

    That is in the feed-forward of the last block, before anything of a block is freed: the activations, less
    those of the end (of which the stream's gradient takes the stream's place); the gradient of the GELU's
    output, 16·BTd; the gradients of the head, the last norm and `down`.
    """
    tokens, width, classes = batch_size * (shape.num_patches + 1), shape.width, shape.num_classes
    freed = batch_size * (8 + 4 * width + 4 * classes)
    grads = 4 * (width + 1) * classes + 8 * width + 4 * (4 * width + 1) * width
    return activation_bytes(shape, batch_size=batch_size) - freed + 16 * tokens * width + grads


def adamw_temporary_bytes(shape: ViTShape, *, foreach: bool) -> int:
    """What AdamW allocates while it steps: the roots of the second moments.

    Its foreach kernels (the default on a GPU) take all of them at once. Its loop (the default on a CPU) takes
    one parameter at a time, and holds the root before and after its bias is corrected.
    """
    if foreach:
        return 4 * shape.num_params
    width = shape.width
    rows = (4 * width, shape.num_channels * shape.patch_size**2, shape.num_classes, shape.num_patches + 1)
    return 2 * 4 * max(rows) * width


def step_bytes(shape: ViTShape, *, batch_size: int, placement: Placement, ranks: int, foreach: bool) -> StepBytes:
    """One rank's step by formula.

    Sharded kinds are divided by the ranks. Sharded parameters are gathered for use: all of them or, where
    they are freed after forward, those of the root, of one block and of the block that is prefetched.
    peak = params + optim + the larger of (gathered + backward) and (grads + AdamW's temporaries). What an
    engine adds, reduce buckets and buffers of collectives, is not in it.
    """

    def held(num_bytes: int, where: Where) -> int:
        return -(-num_bytes // ranks) if where is SHARDED else num_bytes

    whole = 4 * shape.num_params
    # Two moments; the loop also keeps a count of steps with each parameter, foreach keeps it on the host.
    num_tensors = 12 * shape.num_layers + 8
    params, grads = held(whole, placement.params), held(whole, placement.grads)
    optim = held(2 * whole, placement.optim) + (0 if foreach else 4 * num_tensors)
    gathered = 0
    if placement.params is SHARDED and ranks > 1:
        blocks = 4 * block_params(shape)
        root = whole - shape.num_layers * blocks
        gathered = root + 2 * blocks if placement.reshard_after_forward else whole
    backward = gathered + backward_bytes(shape, batch_size=batch_size)
    update = grads + held(adamw_temporary_bytes(shape, foreach=foreach), placement.optim)
    return StepBytes(
        params=params,
        grads=grads,
        optim=optim,
        gathered=gathered,
        activations=activation_bytes(shape, batch_size=batch_size),
        peak=params + optim + max(backward, update + batch_bytes(shape, batch_size=batch_size) + 4),
    )


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operation made and that is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.now_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_iter(outputs):
            if isinstance(output, torch.Tensor) and output.device.type != "meta":
                self._count(output.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.live.add(key)
            self.now_bytes += num_bytes
            weakref.finalize(storage, self._forget, key, num_bytes).atexit = False

    def _forget(self, key: int, num_bytes: int) -> None:
        self.live.remove(key)
        self.now_bytes -= num_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.now_bytes


class CudaAllocator:
    """The same counts as torch's CUDA allocator keeps them."""

    def __enter__(self) -> "CudaAllocator":
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.empty_cache()

    @property
    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def measure(shape: ViTShape, *, batch_size: int, device: str) -> StepBytes:
    """Run one step in this process and count its bytes."""
    with LiveStorages() if device == "cpu" else CudaAllocator() as memory:
        start = memory.now_bytes
        model = build_model(shape, device=device)
        params = memory.now_bytes - start
        # A first step, of gradients that are zero, makes the optimizer's state.
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        optim = memory.now_bytes - start - params

        memory.reset_peak()
        images = torch.randn(batch_size, shape.num_channels, shape.image_size, shape.image_size, device=device)
        labels = torch.randint(shape.num_classes, (batch_size,), device=device)
        loss = F.cross_entropy(model(images), labels)
        activations = memory.now_bytes - start - params - optim
        loss.backward()
        grads = memory.now_bytes - start - params - optim - sum(t.nbytes for t in (images, labels, loss))
        optimizer.step()
        peak = memory.peak_bytes - start
    return StepBytes(params=params, grads=grads, optim=optim, gathered=0, activations=activations, peak=peak)


def step_flops(shape: ViTShape, *, batch_size: int) -> float:
    """Forward and backward of the blocks: 72·BTLd² in matrix products, 12·BT²Ld in attention."""
    tokens, width = shape.num_patches + 1, shape.width
    return batch_size * tokens * shape.num_layers * width * (72.0 * width + 12.0 * tokens)


def free_bytes(device: str) -> int:
    """What can still be allocated, also within a container's limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


class Profiler:
    """Measures sizes, smallest first, as long as memory and time allow; says why where they do not."""

    def __init__(self, *, device: str, batch_size: int, unhurried: bool) -> None:
        self.device = device
        self.batch_size = batch_size
        self.unhurried = unhurried
        self.start_seconds = time.perf_counter()
        self.seconds_per_flop = 0.0

    def measure(self, shape: ViTShape, *, formula: StepBytes) -> StepBytes | str:
        needed, free = formula.peak * 1.1, free_bytes(self.device)
        if needed > free:
            return f"not measured: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} free"
        flops = step_flops(shape, batch_size=self.batch_size)
        estimate = flops * self.seconds_per_flop
        start = time.perf_counter()
        if not self.unhurried and start - self.start_seconds + estimate > CPU_SECONDS:
            return f"not measured: about {estimate:.0f} s here; --measure to try"
        measured = measure(shape, batch_size=self.batch_size, device=self.device)
        self.seconds_per_flop = (time.perf_counter() - start) / flops
        return measured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of a ViT's training step, by formula and measured.")
    parser.add_argument("--model-size", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--strategy", choices=(*STRATEGIES, "all"), help="also what a rank of --ranks holds")
    parser.add_argument("--ranks", type=int, default=2, help="with --strategy (default: 2)")
    parser.add_argument("--batch-size", type=int, default=4, help="samples a step (default: 4)")
    parser.add_argument("--image", type=int, help="pixels a side (default: the model's, 224)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--measure", action="store_true", help="measure every size that fits, however long")
    args = parser.parse_args()
    if min(args.ranks, args.batch_size, args.image or 1) < 1:
        parser.error("--ranks, --batch-size and --image must be at least 1")
    return args


def mebibytes(num_bytes: int) -> str:
    value = num_bytes / 2**20
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def main() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    args = parse_arguments()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    foreach = device == "cuda"
    title = f"A training step of {args.batch_size} samples a rank, AdamW, float32, on {device}; MiB a rank"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    table.add_column("by", max_width=28)
    for name in ("params", "grads", "optim", "gathered", "activations", "peak"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(model: str, source: str, found: StepBytes) -> None:
        parts = (found.params, found.grads, found.optim, found.gathered, found.activations, found.peak)
        table.add_row(model, source, *map(mebibytes, parts))

    profiler = Profiler(device=device, batch_size=args.batch_size, unhurried=args.measure or foreach)
    for size in SIZES if args.model_size == "all" else (args.model_size,):
        shape = shape_of(f"vit-{size}")
        assert isinstance(shape, ViTShape)
        shape = replace(shape, image_size=args.image or shape.image_size)
        step = {"batch_size": args.batch_size, "foreach": foreach}
        formula = step_bytes(shape, placement=STRATEGIES["ddp"], ranks=1, **step)
        add(f"vit-{size}", "1 process, formula", formula)
        measured = profiler.measure(shape, formula=formula)
        if isinstance(measured, StepBytes):
            add("", "1 process, measured", measured)
        else:
            table.add_row("", measured)
        for name, placement in STRATEGIES.items():
            if args.strategy in (name, "all"):
                held = step_bytes(shape, placement=placement, ranks=args.ranks, **step)
                add("", f"{name} on {args.ranks}, formula", held)
        table.add_section()
    console = Console()
    # Cut columns help nobody in a file.
    console.width = max(console.width, 100) if console.is_terminal else 100
    console.print(table)


if __name__ == "__main__":
    main()
