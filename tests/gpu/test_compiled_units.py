"""Compiled units as CUDA graphs: the bits of the same compiled units in ordinary steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_cases import Ran, gpt_batch, run
from torch import Tensor, nn

from shardwise import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def reset_compiler(one_rank: None) -> Any:
    yield
    torch._dynamo.reset()


def both(*, backend: str = "inductor", plan: dict[str, Any] | None = None, **how: Any) -> tuple[Ran, Ran]:
    """(with graphs, without) of the same compiled training."""
    found = []
    for capture in ("auto", "off"):
        torch._dynamo.reset()
        found.append(run(Plan(compile=backend, capture=capture, **(plan or {})), **{"steps": 16, **how}))
    return found[0], found[1]


@pytest.mark.parametrize(
    "plan", [{}, {"precision": "bf16"}, {"recompute": "full"}, {"strategy": "ddp"}], ids=lambda plan: str(plan)
)
def test_a_model_of_ours_gives_the_bits_of_its_compiled_ordinary_steps(plan: dict[str, Any]) -> None:
    graphs, ordinary = both(plan=plan)
    assert graphs.same_as(ordinary)
    assert graphs.num_replayed > 0


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
    graphs, ordinary = both(make_model=make, loss=loss)
    assert graphs.same_as(ordinary)
    assert graphs.num_replayed > 0


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

    graphs, ordinary = both(make_model=make, loss=loss, batch=batch)
    assert graphs.same_as(ordinary)
    assert graphs.num_replayed > 0


class Asking(nn.Module):
    """Computes otherwise while it is recorded, as transformers does."""

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
def test_compiled_code_that_asks_whether_it_is_recorded_computes_as_in_ordinary_steps(backend: str) -> None:
    graphs, ordinary = both(backend=backend, plan={"units": "class:Asking"}, make_model=Embedded)
    assert graphs.same_as(ordinary)
    assert graphs.num_replayed > 0


def test_two_shapes_in_turn_each_have_their_compiled_graph() -> None:
    graphs, ordinary = both(batch=lambda step: gpt_batch(step, size=2 + 2 * (step % 2)), steps=40)
    assert graphs.same_as(ordinary)
    assert graphs.num_replayed > 0
