"""`shardwise train` on a checkpoint folder: it starts from the folder's weights, resumes, and saves what others load."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from torch import nn

from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_sections import DataSection

preload("transformers.models.llama.modeling_llama")

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(180)
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
needs_nf4 = pytest.mark.skipif(
    find_spec("peft") is None or find_spec("bitsandbytes") is None, reason="peft or bitsandbytes is not installed"
)
# The first import of bitsandbytes and PEFT in a rank takes a while.
NF4_SECONDS = 150.0
QLORA = {"lora": 4, "lora_targets": ["q_proj", "v_proj"], "quantize": "nf4"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "notes.txt").write_text("To shard or not to shard, that is the question. " * 40)
    return tmp_path


def config_of(folder: Path, *, steps: int, run: str, **task: Any) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "task": {"model": f"hf:{folder / 'base'}", "dataset": f"text:{folder / 'notes.txt'}", "seq": 16, **task},
            "plan": {"strategy": "fsdp", "micro_batch": 2},
            "optimizer": {"lr": 0.01},
            "schedule": {"name": "constant"},
            "train": {"steps": steps, "eval_every": 0},
            "run": {"folder": str(folder / run), "device": "cpu", "tensorboard": False},
        }
    )


def train_here(rank: int, config: TrainConfig) -> None:
    from shardwise.training.rank_run import train

    train(config)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples_of(config: TrainConfig, *, model: Any) -> list[Any]:
    from shardwise.models.tasks.transformers_task import task_of_model, with_data

    task = with_data(task_of_model(model, seq=16), config.task.dataset, seq=16, vocab_size=260)
    return [task.dataset[index] for index in range(len(task.dataset))]  # type: ignore[arg-type,index]


def first_loss_of_the_folder(config: TrainConfig, *, model: Any = None) -> float:
    from shardwise.models.tasks.transformers_task import cross_entropy_of_logits

    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(config.task.model.removeprefix("hf:"))
    inputs, targets = (torch.stack(part) for part in zip(*samples_of(config, model=model), strict=True))
    return cross_entropy_of_logits(model, (inputs, targets)).item()


def test_it_trains_the_folders_weights_resumes_and_saves_them_for_transformers(folder: Path) -> None:
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=4, run="whole"),))
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=2, run="parts"),))
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=4, run="parts"),))
    assert losses(folder / "whole") == losses(folder / "parts")
    # The samples of one step are a part of all: near, and far from that of other weights.
    assert losses(folder / "whole")[0] == pytest.approx(
        first_loss_of_the_folder(config_of(folder, steps=1, run="-")), rel=0.02
    )
    whole, parts = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / run / "model") for run in ("whole", "parts")
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name])
    assert not torch.equal(whole.lm_head.weight, base.lm_head.weight)
    assert whole.config.use_cache == base.config.use_cache


@needs_peft
def test_adapters_are_trained_on_a_frozen_base_and_saved_for_peft(folder: Path) -> None:
    import peft

    config = config_of(folder, steps=3, run="lora", lora=4, lora_targets=["q_proj", "v_proj"])
    run_ranks(train_here, num_ranks=2, args=(config,))
    # B starts at 0, so that the first loss is the base's.
    assert losses(folder / "lora")[0] == pytest.approx(first_loss_of_the_folder(config), rel=0.02)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / "lora" / "model")
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 2 * 2
    assert all(bool(value.any()) for value in adapters.values())
    assert model.peft_config["default"].lora_alpha == 8


@needs_peft
def test_a_resumed_training_of_adapters_is_the_whole_one(folder: Path) -> None:
    from safetensors.torch import load_file

    adapters = {"lora": 4, "lora_targets": ["q_proj", "v_proj"]}
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=4, run="whole", **adapters),))
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=2, run="parts", **adapters),))
    run_ranks(train_here, num_ranks=2, args=(config_of(folder, steps=4, run="parts", **adapters),))
    assert losses(folder / "whole") == losses(folder / "parts")
    whole, parts = (load_file(folder / run / "model" / "adapter_model.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


@needs_peft
def test_targets_that_no_module_has_are_refused(folder: Path) -> None:
    from shardwise.base.errors import InvalidModel
    from shardwise.models.specs.spec_request import Adaptation
    from shardwise.models.weights.fine_tune import checkpoint_task

    with pytest.raises(InvalidModel, match="task.lora_targets: .*qproj"):
        checkpoint_task(str(folder / "base"), dataset=None, seq=8, adaptation=Adaptation(rank=2, targets=("qproj",)))


def through_nf4(folder: Path) -> Any:
    """The folder's model after every linear layer of its blocks went to NF4 and back."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            packed = quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            assert not torch.equal(module.weight.data, dequantize_4bit(*packed))
            module.weight.data = dequantize_4bit(*packed)
    return model


def train_packed(rank: int, config: TrainConfig) -> tuple[int, int]:
    """Train; return how many layers are packed, and how many bytes of them this rank holds between steps."""
    from bitsandbytes.nn import Linear4bit

    from shardwise.training import rank_run

    trained: list[nn.Module] = []
    save = rank_run._save_model
    rank_run._save_model = lambda training: (trained.append(training.model), save(training))[1]
    try:
        rank_run.train(config)
    finally:
        rank_run._save_model = save
    packed = [module.weight for module in trained[0].modules() if isinstance(module, Linear4bit)]
    with torch._C.DisableTorchFunctionSubclass():
        return len(packed), sum(weight.untyped_storage().nbytes() for weight in packed)


@needs_nf4
def test_adapters_are_trained_on_a_base_in_nf4_and_resume(folder: Path) -> None:
    from safetensors.torch import load_file

    config = config_of(folder, steps=4, run="whole", **QLORA)
    for found in run_ranks(train_packed, num_ranks=2, args=(config,), timeout_seconds=NF4_SECONDS):
        # 7 linear layers in each of 2 blocks; under fsdp no rank holds one of them between steps.
        assert found == (14, 0)
    expected = first_loss_of_the_folder(config, model=through_nf4(folder / "base"))
    assert losses(folder / "whole")[0] == pytest.approx(expected, rel=0.02)
    run_ranks(
        train_here, num_ranks=2, args=(config_of(folder, steps=2, run="parts", **QLORA),), timeout_seconds=NF4_SECONDS
    )
    run_ranks(
        train_here, num_ranks=2, args=(config_of(folder, steps=4, run="parts", **QLORA),), timeout_seconds=NF4_SECONDS
    )
    assert losses(folder / "whole") == losses(folder / "parts")
    whole, parts = (load_file(folder / run / "model" / "adapter_model.safetensors") for run in ("whole", "parts"))
    assert len(whole) == 2 * 2 * 2
    assert all(torch.equal(value, parts[name]) and bool(value.any()) for name, value in whole.items())


@needs_nf4
def test_a_base_in_nf4_computes_what_its_unpacked_weights_compute(folder: Path) -> None:
    """All samples in one step: the first loss is that of the weights that went to NF4 and back, to rounding."""
    config = config_of(folder, steps=1, run="all", **QLORA)
    unpacked_model = through_nf4(folder / "base")
    num_samples = len(samples_of(config, model=unpacked_model))
    config = replace(config, plan=replace(config.plan, micro_batch=num_samples), data=DataSection(shuffle=False))
    run_ranks(train_here, num_ranks=1, args=(config,), timeout_seconds=NF4_SECONDS)
    unpacked = first_loss_of_the_folder(config, model=unpacked_model)
    assert losses(folder / "all")[0] == pytest.approx(unpacked, rel=1e-5)
    assert abs(unpacked - first_loss_of_the_folder(config)) > 1e-4 * unpacked
