"""The trace of compiled units: what torch's partitioner keeps for backward, and what fused kernels allocate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks

from shardwise.base.errors import InvalidModel
from shardwise.models.trace.observe import ObservedStep, TracedTask, Way, observe
from shardwise.models.trace.trace import trace_model
from shardwise.plan import Plan
from shardwise.planner.memory.peak import estimate
from shardwise.program.spec import ROOT, ModelSpec
from shardwise.program.spec.step import Act, Run, StepTrace, Stream, What
from shardwise.program.units import model_spec

WIDTH, SEQ = 32, 24


class Gated(nn.Module):
    """A norm and a gated product, as of Llama: eager PyTorch keeps the norm's parts, and silu's result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixed(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Products(nn.Module):
    """Nothing but products: what they read is kept, by whomever."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        second: Tensor = self.second(self.first(x))
        return second


class Looks(Products):
    """Looks at a value of the batch, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> Tensor:
        assert numbers is not None
        if numbers.max() > 0:
            x = F.silu(self.gate(x)) * x
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        out: Tensor = self.head(x)
        return out


def make_batch(size: int) -> Tensor:
    return torch.zeros(size, SEQ, WIDTH)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).sum()
    return found


@cache
def traced(block: Callable[[], nn.Module], recompute: str, *, device: str = "cuda") -> StepTrace:
    way = Way(computes_in="fp32", recompute=recompute, device=device)
    with torch.device("meta"):
        model = Stack(block)
    spec = trace_model(model, loss=loss, make_batch=make_batch, policy=f"class:{block.__name__}", ways=[way])
    return spec.traces[0]


def stream(trace: StepTrace, trigger: str, *, unit: str = "blocks.1") -> Stream:
    return next(row.stream for row in trace.rows if (row.trigger, row.unit) == (trigger, unit))


def heights(events: Stream, *, batch: int = 2) -> tuple[int, int]:
    """(The most that a stream holds of what it bore, what is left of it); gradients of parameters left out."""
    height = most = 0
    for event in events.events:
        if event.what is What.ACTIVATION and event.ordinal is not None:
            height += event.num_bytes.at(batch=batch) * (1 if event.act is Act.BORN else -1)
            most = max(most, height)
    return most, height


def kept(trace: StepTrace) -> int:
    return heights(stream(trace, "before forward"))[1]


def saved_by_torch_compile(block: nn.Module) -> int:
    """Bytes that a compiled block leaves behind: its output, and what is saved, without its input and its parameters.

    As torch.compile runs it with Inductor's own decompositions, passes and partitioner; operations run as they are.
    """
    backend = aot_autograd(
        fw_compiler=lambda module, _: module, partition_fn=partition_fn, decompositions=select_decomp_table()
    )
    compiled, x = torch.compile(block, backend=backend), make_batch(2).requires_grad_()
    storages: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        see(compiled(x))
    torch._dynamo.reset()
    for given in (x, *block.parameters()):
        storages.pop(given.untyped_storage()._cdata, None)
    return sum(storages.values())


# Attention has other kernels on a CPU, where it is compiled here; the others have none of their own.
@pytest.mark.parametrize(
    ("block", "device"),
    [
        (Gated, "cuda"),
        pytest.param(Attends, "cpu", marks=pytest.mark.whole),
        pytest.param(Products, "cuda", marks=pytest.mark.whole),
    ],
)
def test_a_compiled_unit_keeps_what_torch_compile_saves(block: Callable[[], nn.Module], device: str) -> None:
    assert kept(traced(block, "compiled", device=device)) == saved_by_torch_compile(block())


def test_the_partitioner_keeps_less_than_eager_pytorch() -> None:
    eager, compiled = traced(Gated, "none"), traced(Gated, "compiled")
    row = 2 * SEQ * 4
    # The input of the first two products, both results, the input of the third, the norm's deviation, the output.
    assert kept(compiled) == (5 * WIDTH + 1) * row
    # In addition silu's result, and the norm's before it is scaled.
    assert kept(eager) == (7 * WIDTH + 1) * row


def test_of_products_alone_as_much_is_kept() -> None:
    eager, compiled = traced(Products, "none"), traced(Products, "compiled")
    assert kept(compiled) == kept(eager) > 0


def test_a_fused_chain_allocates_what_leaves_it() -> None:
    eager, compiled = traced(Gated, "none"), traced(Gated, "compiled")
    tensor = 2 * SEQ * WIDTH * 4
    most, left = heights(stream(compiled, "before forward"))
    # Besides what is kept only the third product's result, which the residual sum is written over.
    assert most == left
    most, _ = heights(stream(compiled, "before backward"))
    # The gradients of both factors, and of the input of the first two products, by each of them.
    assert most <= 4 * tensor + 2 * SEQ * 4
    assert most < heights(stream(eager, "before backward"))[0]


@pytest.mark.parametrize("recompute", ["compiled", "compiled-full"])
def test_all_that_compiled_units_bear_dies_and_equal_ones_are_traced_once(recompute: str) -> None:
    trace = traced(Gated, recompute)
    alive = 0
    for row in trace.expand():
        for event in row.stream.events:
            if event.what is What.ACTIVATION:
                alive += event.num_bytes.at(batch=2) * (1 if event.act is Act.BORN else -1)
    assert abs(alive) <= 8
    assert len(trace.runs) == 1


def test_recomputed_in_full_a_compiled_unit_keeps_its_output_alone_and_runs_compiled_again() -> None:
    compiled, full = traced(Gated, "compiled"), traced(Gated, "compiled-full")
    assert kept(full) == 2 * SEQ * WIDTH * 4
    again, once = (heights(stream(trace, "before backward"))[0] for trace in (full, compiled))
    assert kept(compiled) <= again <= kept(compiled) + once


def test_a_unit_that_looks_at_values_counts_as_uncompiled() -> None:
    def look(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch, numbers=batch[0, 0].abs() + 1).sum()
        return found

    with torch.device("meta"):
        model = Stack(Looks)
    eager, compiled = trace_model(
        model,
        loss=look,
        make_batch=lambda size: torch.ones(size, SEQ, WIDTH),
        policy="class:Looks",
        ways=[Way(computes_in="fp32", recompute=recompute) for recompute in ("none", "compiled")],
    ).traces
    assert kept(compiled) == kept(eager) > 0


def test_what_follows_no_law_counts_as_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: TracedTask, *, way: Way, batch_size: int, runs: Sequence[Run]) -> ObservedStep:
        if way.is_compiled:
            raise InvalidModel("runs other operations for another batch size")
        return observe(task, way=way, batch_size=batch_size, runs=runs)

    monkeypatch.setattr("shardwise.models.trace.trace.observe", refuse)
    eager, compiled = traced(Products, "none"), traced.__wrapped__(Products, "compiled")
    assert compiled == replace(eager, recompute="compiled")


def peak_bytes(spec: ModelSpec, **plan: str) -> int:
    found = Plan(strategy="ddp", precision="fp32", units="class:Gated", **plan)  # type: ignore[arg-type]
    return estimate(spec, plan=found, num_ranks=1, batch=64).allocated_bytes


def test_a_compiled_plan_takes_the_memory_of_compiled_units() -> None:
    with torch.device("meta"):
        spec = model_spec(Stack(Gated), policy="class:Gated", name="gated")
    spec = replace(spec, call_order=(ROOT, *(f"blocks.{number}" for number in range(6))))
    ways = [traced(Gated, recompute) for recompute in ("none", "full", "compiled", "compiled-full")]
    # A unit that recomputes selectively is not compiled; that it is recomputed at all is not what is asked here.
    spec = replace(spec, traces=(*ways, replace(ways[1], recompute="selective")))
    saved = 64 // 2 * (kept(ways[0]) - kept(ways[2]))
    assert peak_bytes(spec) - peak_bytes(spec, compile="inductor") >= 5 * saved
    assert peak_bytes(spec, compile="inductor", recompute="full") < peak_bytes(spec, recompute="full")
    assert peak_bytes(spec, compile="aot_eager") == peak_bytes(spec)
    selective = peak_bytes(spec, recompute="selective")
    assert peak_bytes(spec, compile="inductor", recompute="selective") == selective
    before = replace(spec, traces=spec.traces[:2])
    assert peak_bytes(before, compile="inductor") == peak_bytes(spec)
