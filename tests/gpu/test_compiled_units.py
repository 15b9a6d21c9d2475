"""Compiled units, captured: the bits of the same compiled units in ordinary steps; by default, without being asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_cases import SHAPE, Ran, deterministic, gpt_batch, run
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.engine.captured.step_graphs import StepRecorder
from shardwise.models.make import build_model
from shardwise.models.tasks import cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REPLAYED = "capture: steps are replayed as CUDA graphs from here on"


@pytest.fixture(autouse=True)
def reset_compiler(one_rank: None) -> Any:
    yield
    torch._dynamo.reset()


def both(*, backend: str = "inductor", plan: dict[str, Any] | None = None, **how: Any) -> tuple[Ran, Ran]:
    """(captured, ordinary) of the same compiled training."""
    found = []
    for capture in ("auto", "off"):
        torch._dynamo.reset()
        found.append(run(Plan(compile=backend, capture=capture, **(plan or {})), steps=16, **how))
    return found[0], found[1]


def assert_replayed(captured: Ran, *, reads: str = "") -> None:
    assert captured.lines == [REPLAYED + reads], captured.lines
    # The first step compiles and does not count; replays 1 and 10 are compared with ordinary steps.
    assert [number for number, replayed in enumerate(captured.replayed) if not replayed] == [0, 1, 2, 3, 4, 13]


@pytest.mark.parametrize(
    "plan", [{}, {"precision": "bf16"}, {"recompute": "full"}, {"strategy": "ddp"}], ids=lambda plan: str(plan)
)
def test_a_model_of_ours_gives_the_bits_of_its_compiled_ordinary_steps(plan: dict[str, Any]) -> None:
    captured, ordinary = both(plan=plan)
    assert captured.same_as(ordinary)
    assert_replayed(captured)


def hugging_face(kind: str) -> tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor]]:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

    def make() -> nn.Module:
        if kind == "bert":
            config = transformers.BertConfig(
                vocab_size=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small
            )
            return transformers.BertForMaskedLM(config).train()  # type: ignore[no-any-return]
        config = transformers.Qwen3Config(
            vocab_size=256, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, use_cache=False, **small
        )
        return transformers.Qwen3ForCausalLM(config).train()  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ids, labels = batch
        found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        return found

    return make, loss


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_a_hugging_face_model_gives_the_bits_of_its_compiled_ordinary_steps(kind: str) -> None:
    make, loss = hugging_face(kind)
    captured, ordinary = both(make_model=make, loss=loss)
    assert captured.same_as(ordinary)
    assert captured.lines[0].startswith(REPLAYED)
    assert len(captured.lines) == 1
    assert sum(captured.replayed) == 10


def test_a_timm_model_gives_the_bits_of_its_compiled_ordinary_steps() -> None:
    timm = pytest.importorskip("timm")

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return images.cuda(), torch.randint(10, (4,), generator=generator).cuda()

    def make() -> nn.Module:
        return timm.create_model(  # type: ignore[no-any-return]
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10
        )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    captured, ordinary = both(make_model=make, loss=loss, batch=batch)
    assert captured.same_as(ordinary)
    assert_replayed(captured)


class Asking(nn.Module):
    """Computes otherwise while it is captured, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        if torch.cuda.is_current_stream_capturing():
            x = x * 2
        return torch.relu(x)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(Asking() for _ in range(2))
        self.head = nn.Linear(64, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_that_asks_whether_it_is_captured_is_told_what_ordinary_steps_are_told(backend: str) -> None:
    captured, ordinary = both(backend=backend, plan={"units": "class:Asking"}, make_model=Embedded)
    assert captured.same_as(ordinary)
    assert_replayed(captured)


def test_code_that_is_compiled_again_in_a_recording_is_a_line_and_ordinary_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = StepRecorder.record

    def forgetful(self: StepRecorder, *given: Any, **named: Any) -> Any:
        torch._dynamo.reset()
        return record(self, *given, **named)

    monkeypatch.setattr(StepRecorder, "record", forgetful)
    captured, ordinary = both(backend="aot_eager")
    assert captured.same_as(ordinary)
    assert not any(captured.replayed)
    (line,) = captured.lines
    assert "not captured: torch.compile compiles again when the step is recorded: filename: " in line


def test_two_shapes_in_turn_each_have_their_compiled_graph() -> None:
    captured, ordinary = both(batch=lambda step: gpt_batch(step, size=2 + 2 * (step % 2)))
    assert captured.same_as(ordinary)
    assert sum(captured.replayed) > 4


@pytest.mark.parametrize("passes", [1, 3])
def test_one_call_per_step_is_captured_and_gives_the_bits_of_a_loop_written_by_hand(passes: int) -> None:
    by_hand = run(Plan(capture="off"), steps=16, passes=passes)
    torch.manual_seed(0)
    model = build_model(SHAPE, device="cpu").cuda()
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    shardwise.prepare(model, optimizer, Plan())
    step = shardwise.step(model, optimizer, cross_entropy, max_norm=1.0, tell=lambda line: None)
    losses, replayed = [], []
    with deterministic():
        for number in range(16):
            batches = [gpt_batch(number * passes + part) for part in range(passes)]
            losses.append(step(*batches).item())
            replayed.append(step.captured)
    assert losses == by_hand.losses
    weights = shardwise.full_state_dict(model)["model"]
    assert all(torch.equal(weights[name], value) for name, value in by_hand.weights.items())
    assert sum(replayed) == 11
