"""Compiled units in captured steps: what they look at is seen, and a step in which torch compiles says nothing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs_on_cpu import captured_on_cpu
from torch import Tensor, nn
from torch._dynamo.utils import counters
from whole import whole

import shardwise
from shardwise import Plan
from shardwise.engine.graphs.compile_clock import CompileClock
from shardwise.engine.graphs.reads import assuming_reads, in_one_line, noting_reads


@pytest.fixture(autouse=True)
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


class Block(nn.Module):
    """Takes a branch by a value, inside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        if mask.all():
            return x + 1
        return x * mask[:, None]


class NumberBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x) * mask.sum().item()


class Net(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Run:
    """A training of a model whose blocks are compiled, captured or not."""

    def __init__(self, kind: type[Block], *, captured: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Net(kind)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        shardwise.prepare(self.model, optimizer, Plan(units=f"class:{kind.__name__}", compile="aot_eager"))

        def step(*inputs: Tensor) -> Tensor:
            loss: Tensor = self.model(*inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.step: Any = step
        self.lines: list[str] = []
        if captured:
            self.step, self.lines, _ = captured_on_cpu(step, self.model, optimizer)
        self.losses: list[float] = []
        self.replayed: list[bool] = []

    def take(self, *inputs: Tensor) -> None:
        self.losses.append(self.step(*inputs).item())
        self.replayed.append(hasattr(self.step, "report") and self.step.report.captured)


def batch(step: int, *, padded: bool = False, size: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.ones(size, dtype=torch.bool)
    mask[-1] = not padded
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(step)), mask


def test_a_value_that_compiled_code_looks_at_is_guarded_and_compiling_steps_do_not_count() -> None:
    batches = [batch(step, padded=step in (9, 14)) for step in range(20)]
    captured, ordinary = Run(Block, captured=True), Run(Block, captured=False)
    for run in (captured, ordinary):
        for each in batches:
            run.take(*each)
    assert captured.losses == ordinary.losses
    ours, theirs = captured.model.state_dict(), ordinary.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert captured.lines == [
        "capture: steps are replayed as CUDA graphs from here on, 2 values that it looks at are guarded"
    ]
    # The first step compiled, three were warm, the first replay is compared; 9 and 14 look at another value.
    ordinary_steps = [number for number, replayed in enumerate(captured.replayed) if not replayed]
    assert ordinary_steps == [0, 1, 2, 3, 4, 9, 14, 15]


def test_a_number_that_compiled_code_reads_is_the_reason_not_to_capture() -> None:
    run = Run(NumberBlock, captured=True)
    for step in range(8):
        run.take(*batch(step))
    (line,) = run.lines
    assert line.startswith("capture: ordinary steps, not captured: test_compiled_capture.py:")
    assert line.endswith("reads a number from the device")


def test_looking_at_reads_compiles_nothing_again() -> None:
    block, (x, mask) = Block(), batch(0)
    forward = torch.compile(block.forward, backend="aot_eager")
    expected = forward(x, mask)
    num_graphs = counters["stats"]["unique_graphs"]
    with CompileClock() as clock:
        with noting_reads("cpu") as noted:
            assert torch.equal(forward(x, mask), expected)
        with assuming_reads(noted.reads, device_type="cpu", compare=lambda *_: None):
            assert torch.equal(forward(x, ~mask), expected)
    assert len(noted.reads) == 1
    assert (clock.num_compiles, counters["stats"]["unique_graphs"]) == (0, num_graphs)


def test_code_that_would_be_compiled_again_in_a_recording_is_namedin_one_line() -> None:
    forward = torch.compile(Block().forward, backend="aot_eager")
    with CompileClock() as clock:
        forward(*batch(0))
    assert clock.num_compiles > 0
    assert clock.seconds > 0
    with pytest.raises(RuntimeError) as caught, torch.compiler.set_stance("fail_on_recompile"):
        forward(*batch(0, size=6))
    line = in_one_line(caught.value)
    assert line.startswith("torch.compile compiles again when the step is recorded: filename: ")
    assert "function name: 'forward'" in line


@pytest.mark.parametrize("kind", ["Qwen3", "Bert", *whole("Llama", "Gemma3")])
def test_hugging_face_layers_are_compiled_whole_and_nothing_is_compiled_again_when_they_are_watched(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    small |= {"vocab_size": 64, "max_position_embeddings": 64}
    # Dropout draws its numbers on the CPU here, which no graph does.
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small |= without_dropout if kind == "Bert" else {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**small)
    made = getattr(transformers, f"{kind}ForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM")
    model = made._from_config(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    shardwise.prepare(model, optimizer, Plan(compile="aot_eager"))

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured, lines, _ = captured_on_cpu(step, model, optimizer)
    ids = torch.arange(32).reshape(2, 16)
    replayed = []
    for _ in range(7):
        captured(ids)
        replayed.append(captured.report.captured)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] <= 2
    assert replayed == [False] * 5 + [True] * 2, lines
