"""Weights leave and enter checkpoints as ordinary safetensors files, in our names and in Hugging Face's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.checkpoint import CheckpointError, Checkpoints, open_checkpoint
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.state.checkpoint.export import export_weights, import_weights
from shardwise.state.checkpoint.padded_rows import vocabularies

GPT = GPTShape(num_layers=2, width=12, num_heads=3, vocab_size=31, max_seq=8)
LLAMA = LlamaShape(num_layers=2, width=16, num_heads=4, num_kv_heads=2, ffn_width=24, vocab_size=29, max_seq=8)


def saved(folder: Path, model: nn.Module) -> Path:
    checkpoints = Checkpoints(folder, asynchronous=False)
    checkpoints.save(model, step=1)
    return folder / "step-00000001"


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """By all names, as ties are exported, without the padding of vocabularies."""
    rows = vocabularies(model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: value.detach()[: rows[name]] if name in rows else value.detach() for name, value in named}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_one_file_is_read_by_safetensors_load_file(tmp_path: Path) -> None:
    model = nn.Sequential(build_model(GPT), nn.BatchNorm1d(3))
    (file,) = export_weights(saved(tmp_path, model), tmp_path / "out" / "weights.safetensors")
    assert equal(load_file(file), weights(model))


def test_a_module_with_tied_weights_loads_the_export_by_all_of_its_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, again = tied(), tied()
    (file,) = export_weights(saved(tmp_path, model), tmp_path / "weights.safetensors")
    again.load_state_dict(load_file(file))
    assert torch.equal(again["head"].weight, model["embed"].weight)
    # A checkpoint made of the file knows the tie, also for a module without it.
    imported = import_weights([file], tmp_path / "imported")
    for other in (tied(), nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})):
        Checkpoints(tmp_path / "imported").load(open_checkpoint(imported), other)
        assert torch.equal(other["head"].weight, model["embed"].weight)


def test_several_files_and_their_index_hold_every_tensor_once(tmp_path: Path) -> None:
    model = build_model(GPT)
    *files, index = export_weights(saved(tmp_path, model), tmp_path / "out", most_file_bytes=4000)
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert equal({name: value for file in files for name, value in load_file(file).items()}, weights(model))
    where = json.loads(index.read_text())["weight_map"]
    assert all(name in load_file(tmp_path / "out" / file) for name, file in where.items())
    assert where.keys() == weights(model).keys()


def test_floating_point_is_exported_in_the_precision_asked_for(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    (file,) = export_weights(saved(tmp_path, model), tmp_path / "x.safetensors", dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(file).values()} == {torch.bfloat16, torch.int64}


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = saved(tmp_path, build_model(GPT))
    (path / "rank-00000.safetensors").write_bytes(b"x" * (path / "rank-00000.safetensors").stat().st_size)
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: is damaged"):
        export_weights(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_hugging_faces_own_model_takes_the_export_and_its_files_come_back(tmp_path: Path, shape: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = build_model(shape)
    (file,) = export_weights(saved(tmp_path / "ours", model), tmp_path / "hf", hugging_face=True)
    if shape is GPT:
        config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=3)
        theirs = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=29,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8,
            rms_norm_eps=1e-5,
        )
        theirs = transformers.LlamaForCausalLM(config)
    theirs.eval()
    missing, unexpected = theirs.load_state_dict(load_file(file), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(theirs(tokens).logits, model(tokens)[..., : shape.vocab_size], atol=2e-5, rtol=1e-5)

    # A file that holds a tied head twice is taken too.
    state = {name: value.clone().contiguous() for name, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "again.safetensors")
    imported = import_weights([tmp_path / "again.safetensors"], tmp_path / "imported", hugging_face=True)
    torch.manual_seed(5)
    again = build_model(shape)
    loaded = Checkpoints(tmp_path / "imported").load(open_checkpoint(imported), again)
    assert loaded.step == 0
    assert equal(weights(again), weights(model))


def test_plain_files_come_back_and_into_another_precision(tmp_path: Path) -> None:
    model = build_model(GPT)
    files = export_weights(saved(tmp_path, model), tmp_path / "out", dtype=torch.bfloat16, most_file_bytes=4000)[:-1]
    imported = import_weights(files, tmp_path / "imported")
    other = build_model(GPT)
    checkpoints = Checkpoints(tmp_path / "imported")
    checkpoints.load(checkpoints.latest(), other)
    assert checkpoints.latest().path == imported
    assert equal(weights(other), {name: value.bfloat16().float() for name, value in weights(model).items()})


def test_a_tied_checkpoint_fills_an_untied_model(tmp_path: Path) -> None:
    model = build_model(GPT)
    saved(tmp_path, model)
    other = build_model(GPT)
    other.head.weight = nn.Parameter(torch.zeros_like(other.head.weight))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load(checkpoints.latest(), other)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_names_of_neither_architecture_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Linear(2, 2))
    with pytest.raises(InvalidModel, match="not the tensors of a Llama or a GPT-2: bias, weight"):
        export_weights(path, tmp_path / "out", hugging_face=True)
    save_file({"weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(InvalidModel, match="not the tensors of a Llama or a GPT-2"):
        import_weights([tmp_path / "x.safetensors"], tmp_path / "in", hugging_face=True)
    assert not (tmp_path / "in").exists()


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="weight is in .*a and in .*b"):
        import_weights([tmp_path / "a", tmp_path / "b"], tmp_path / "in")
