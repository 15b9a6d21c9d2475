"""A trace on fake tensors runs the operations that a real step runs, whatever the model asks about values or tracing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from whole import whole

from shardwise.base.errors import InvalidModel
from shardwise.models.trace.observe import TracedTask, Way, observe
from shardwise.models.trace.recorder import Did, OpRecorder, TraceEntry
from shardwise.program.units import model_spec, unit_modules

WAY = Way(computes_in="fp32", device="cpu")
Loss = Callable[[nn.Module, Any], Tensor]


def names(entries: list[TraceEntry]) -> list[str]:
    return [entry.name for entry in entries if isinstance(entry, Did)]


def traced(model: nn.Module, *, loss: Loss, make_batch: Callable[[int], Any]) -> list[str]:
    spec = model_spec(model)
    task = TracedTask(
        name="model",
        model=model,
        loss=loss,
        make_batch=make_batch,
        units=unit_modules(model),
        owners={param.name: unit.name for unit in spec.units for param in unit.params},
    )
    return names(observe(task, way=WAY, batch_size=2, runs=()).entries)


def really_run(model: nn.Module, *, loss: Loss, make_batch: Callable[[int], Any]) -> list[str]:
    batch = make_batch(2)
    recorder = OpRecorder(scratch={}, in_fp32={})
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(batch)):
        recorder.ignore(tensor)
    with recorder:
        value = loss(model, batch)
        recorder.in_backward = True
        value.backward()
    return names(recorder.entries)


def assert_same(model: nn.Module, *, loss: Loss, make_batch: Callable[[int], Any]) -> None:
    expected = really_run(model, loss=loss, make_batch=make_batch)
    for parameter in model.parameters():
        parameter.grad = None
    assert traced(model, loss=loss, make_batch=make_batch) == expected


class Looks(nn.Module):
    """Masks only what needs it, and works on as many tokens as the longest sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(dim=1).max())
        hidden = self.embedding(tokens[:, :longest])
        if not mask[:, :longest].all():
            hidden = hidden * mask[:, :longest, None]
        return self.head(hidden)


def looks_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("lengths", [(6, 6), (3, 6), (4, 4)])
def test_a_model_that_looks_at_its_mask_is_traced_as_it_runs(lengths: tuple[int, int]) -> None:
    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        mask = torch.stack([(torch.arange(6) < length).long() for length in lengths])
        return torch.arange(12).view(2, 6) % 10, mask

    assert_same(Looks(), loss=looks_loss, make_batch=make_batch)


class LooksAtWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if self.head(x).sum() > 0 else x * self.head.weight.sum()


def test_what_follows_from_weights_is_still_unknown() -> None:
    with pytest.raises(InvalidModel, match="depends on the data"):
        traced(LooksAtWeights(), loss=lambda model, x: model(x).sum(), make_batch=lambda size: torch.ones(size, 4))


class DropsLayers(nn.Module):
    """Leaves its layer out now and then, as Whisper and wav2vec2 do."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.layer, self.head, self.part = nn.Linear(4, 4), nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if torch.rand([]) < self.part else self.layer(x))


@pytest.mark.parametrize(("part", "num_layers"), [(0.0, 2), (0.1, 2), (0.9, 1)])
def test_a_layer_is_left_out_of_the_trace_where_it_mostly_is(part: float, num_layers: int) -> None:
    found = traced(DropsLayers(part), loss=lambda model, x: model(x).sum(), make_batch=lambda size: torch.ones(size, 4))
    assert found.count("addmm") == num_layers


class Writes(nn.Module):
    """Writes into its mask: the batch of the next run is as it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[0] = 0
        mask[1:].add_(torch.ones_like(mask[1:]))
        assert int(mask.sum()) == 2 * (mask.numel() - 1)
        return self.head(x) * mask[:, None]


def test_what_a_model_writes_into_known_values_is_known() -> None:
    batch = (torch.ones(3, 4), torch.ones(3, dtype=torch.int64))
    assert_same(Writes(), loss=looks_loss, make_batch=lambda size: tuple(part.clone() for part in batch))


TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GPT = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
CAUSAL = {
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "Gemma3ForCausalLM": {**GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "MistralForCausalLM": {**GROUPED, "sliding_window": 64},
    "Phi3ForCausalLM": {**GROUPED, "pad_token_id": 0},
    "GPT2LMHeadModel": GPT,
    "GPTNeoXForCausalLM": TEXT,
    "OPTForCausalLM": {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "Olmo2ForCausalLM": GROUPED,
}
MASKED = {
    "BertForMaskedLM": TEXT,
    "RobertaForMaskedLM": {**TEXT, "pad_token_id": 1},
    "DistilBertForMaskedLM": {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    "ElectraForMaskedLM": {**TEXT, "embedding_size": 16},
    "AlbertForMaskedLM": {**TEXT, "embedding_size": 8},
}
SEQUENCES = {
    "T5ForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 32,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
    },
}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def text_batch(*, mask: str) -> Callable[[int], dict[str, Tensor]]:
    def make(size: int) -> dict[str, Tensor]:
        tokens = torch.arange(size * 12).view(size, 12) % 50 + 3
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if mask != "none":
            batch["attention_mask"] = torch.ones(size, 12, dtype=torch.int64)
        if mask == "padded":
            batch["attention_mask"][0, 9:] = 0
        return batch

    return make


WITH_ONES = ("GPT2LMHeadModel", "T5ForConditionalGeneration")


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("Gemma3ForCausalLM", "none"), ("LlamaForCausalLM", "padded"), ("BertForMaskedLM", "padded")),
        ("BartForConditionalGeneration", "padded"),
        *((name, "ones") for name in WITH_ONES),
        *whole(*((name, "ones") for name in (*CAUSAL, *MASKED, *SEQUENCES) if name not in WITH_ONES)),
        *whole(("LlamaForCausalLM", "none"), ("BertForMaskedLM", "none")),
    ],
)
def test_hugging_face_models_are_traced_as_they_run(name: str, mask: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**CAUSAL, **MASKED, **SEQUENCES}[name]))
    model.config.use_cache = False
    model.eval()
    assert_same(model, loss=own_loss, make_batch=text_batch(mask=mask))


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "resnet18",
        "convnext_atto",
        "mobilenetv3_small_050",
        "mixer_s32_224",
        "deit_tiny_patch16_224",
    ],
)
def test_timm_models_are_traced_as_they_run(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=10)
    images = torch.randn(2, 3, 224, 224)
    assert_same(model, loss=lambda model, x: model(x).square().mean(), make_batch=lambda size: images)
