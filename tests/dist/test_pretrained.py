"""Hugging Face folders into slices, and back: what is loaded, trained with and saved is what transformers knows."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import preload, run_ranks
from torch import Tensor, nn
from training import line
from whole import whole

import shardwise
from shardwise import Plan

preload("transformers.models.llama.modeling_llama")

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
# Class → its config's class and what is said in it.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**TEXT, "tie_word_embeddings": False}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("MistralConfig", {**TEXT, "num_key_value_heads": 2}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**TEXT, "num_key_value_heads": 2, "head_dim": 8}),
    "Phi3ForCausalLM": ("Phi3Config", {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT),
    "OPTForCausalLM": (
        "OPTConfig",
        {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "BertForMaskedLM": ("BertConfig", TEXT),
    "RobertaForSequenceClassification": ("RobertaConfig", {**TEXT, "max_position_embeddings": 20, "pad_token_id": 1}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    ),
    "ViTForImageClassification": ("ViTConfig", {**TEXT, "image_size": 8, "patch_size": 4}),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
}
USUAL = ("Qwen3ForCausalLM", "GPT2LMHeadModel", "ResNetForImageClassification")


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")


def make(name: str) -> Any:
    import transformers

    torch.manual_seed(1)
    config_name, options = ARCHITECTURES[name]
    model = getattr(transformers, name)(getattr(transformers, config_name)(**options))
    with torch.no_grad():
        # Values that no initialisation would give, also those that begin at 0 or 1.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.add_(torch.rand_like(tensor) / 8)
    return model


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def goes_round(rank: int, names: list[str], strategy: str, folder: str) -> None:
    import transformers

    for name in names:
        theirs, ours = Path(folder, name, "theirs"), Path(folder, name, "ours")
        expected = make(name)
        if rank == 0:
            # In several files, with an index.
            expected.save_pretrained(theirs, max_shard_size=3000)
        dist.barrier()
        kind = getattr(transformers, name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = shardwise.from_pretrained(kind, theirs, Plan(strategy=strategy))
        assert isinstance(model, kind)
        assert not model.training
        same(model.state_dict(), expected.state_dict())
        # And again into fewer files, over a folder that has other ones.
        shardwise.save_pretrained(model, ours, most_file_bytes=2000)
        assert len(list(ours.glob("*.safetensors"))) > 1
        shardwise.save_pretrained(model, ours)
        assert [path.name for path in ours.glob("model*")] == ["model.safetensors"]
        again = kind.from_pretrained(ours)
        same(again.state_dict(), expected.state_dict())
        assert again.config.architectures == [name]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp")])
def test_a_folder_of_transformers_is_loaded_into_slices_and_saved_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    needs("transformers")
    run_ranks(goes_round, num_ranks=2, args=(list(USUAL), strategy, str(tmp_path)), timeout_seconds=160.0)


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_thirteen_architectures_are_loaded_and_saved_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    needs("transformers")
    run_ranks(goes_round, num_ranks=2, args=(list(ARCHITECTURES), strategy, str(tmp_path)), timeout_seconds=280.0)


def trains_from(rank: int, folder: str) -> None:
    """bf16 computes in bf16 and keeps the file's digits; a config names its class; a head that is missing is told."""
    import transformers

    expected = make("LlamaForCausalLM")
    if rank == 0:
        expected.save_pretrained(folder)
    dist.barrier()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = shardwise.from_pretrained(config, folder, Plan(precision="bf16"))
    assert next(model.parameters()).dtype == torch.bfloat16
    same(model.state_dict(), expected.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(8).view(1, 8) + rank
    first = model(input_ids=ids, labels=ids).loss
    first.backward()
    optimizer.step()
    assert model(input_ids=ids, labels=ids).loss < first
    if rank == 0:
        with pytest.warns(UserWarning, match=r"1 initialised, not in the files \(score.weight\); 1 in the files alone"):
            other = shardwise.from_pretrained(transformers.LlamaForSequenceClassification, folder, Plan())
    else:
        other = shardwise.from_pretrained(transformers.LlamaForSequenceClassification, folder, Plan())
    score = other.state_dict()["score.weight"]
    assert 0 < score.abs().max() < 0.2


@pytest.mark.timeout(120)
def test_what_was_loaded_trains_with_the_files_digits_and_what_is_missing_is_initialised_and_told(
    tmp_path: Path,
) -> None:
    needs("transformers")
    run_ranks(trains_from, num_ranks=2, args=(str(tmp_path),), timeout_seconds=100.0)


def mistakes(rank: int, folder: str) -> None:
    import transformers

    kind = transformers.LlamaForCausalLM
    expected = make("LlamaForCausalLM")
    good, empty, cut = Path(folder, "good"), Path(folder, "empty"), Path(folder, "cut")
    if rank == 0:
        for path in (good, empty, cut):
            expected.save_pretrained(path, max_shard_size=3000)
        for path in empty.glob("model*"):
            path.unlink()
        index = json.loads((cut / "model.safetensors.index.json").read_text())
        index["weight_map"]["x"] = "../outside.safetensors"
        (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    assert "has neither model.safetensors nor" in line(lambda: shardwise.from_pretrained(kind, empty, Plan()))
    assert "outside of its folder" in line(lambda: shardwise.from_pretrained(kind, cut, Plan()))
    other = transformers.BertForMaskedLM
    assert "holds other names than BertForMaskedLM" in line(lambda: shardwise.from_pretrained(other, good, Plan()))
    config = transformers.LlamaConfig(**TEXT)
    assert "give the model's class" in line(lambda: shardwise.from_pretrained(config, good, Plan()))
    # A folder that cannot be written is told on every rank.
    model = shardwise.from_pretrained(kind, good, Plan())
    (Path(folder) / "file").touch()
    assert "the model was not saved" in line(lambda: shardwise.save_pretrained(model, Path(folder, "file")))
    same(model.state_dict(), expected.state_dict())


@pytest.mark.timeout(120)
def test_a_folder_without_weights_or_of_another_model_is_refused_in_one_line_on_every_rank(tmp_path: Path) -> None:
    needs("transformers")
    run_ranks(mistakes, num_ranks=2, args=(str(tmp_path),), timeout_seconds=100.0)


class OneByOne(dict[str, Any]):
    """Weights that note who asked for them."""

    asked: list[str]

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


def weighed(rank: int, strategy: str) -> list[str]:
    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False), nn.Linear(3, 4))
        model[3].weight = model[0].weight
        return model

    torch.manual_seed(rank)
    weights = OneByOne(made().state_dict())
    # The tied weight goes by its other name; one is not given.
    del weights["0.weight"], weights["2.weight"]
    weights.asked = []
    with torch.device("meta"):
        model = made()
    shardwise.prepare(model, None, Plan(strategy=strategy), device="cpu", weights=weights)
    state = model.state_dict()
    if rank == 0:
        for name, value in weights.items():
            assert torch.equal(state[name], value), name
    assert torch.equal(state["0.weight"], state["3.weight"])
    asked = list(weights.asked)
    weights["0.bias"] = torch.zeros(5)
    with torch.device("meta"):
        wrong = made()
    refused = line(lambda: shardwise.prepare(wrong, None, Plan(), device="cpu", weights=weights))
    assert "0.bias has shape (5,) there, (4,) in the model" in refused
    return asked


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_by_name_are_asked_for_once_by_rank_0(strategy: str) -> None:
    first, second = run_ranks(weighed, num_ranks=2, args=(strategy,))
    assert len(first) == len(set(first)) == 8
    assert second == []


def initialised(rank: int) -> None:
    import transformers

    config = transformers.GPT2Config(**ARCHITECTURES["GPT2LMHeadModel"][1])
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    # Conv1D of transformers has no reset_parameters.
    shardwise.prepare(model, None, Plan(), device="cpu")
    state = model.state_dict()
    assert 0.01 < state["transformer.h.0.mlp.c_fc.weight"].std() < 0.03
    assert torch.equal(state["transformer.h.0.ln_1.weight"], torch.ones(16))
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


@pytest.mark.timeout(90)
def test_a_model_of_transformers_on_the_meta_device_is_initialised_as_transformers_does() -> None:
    needs("transformers")
    run_ranks(initialised, num_ranks=2, timeout_seconds=80.0)
