"""transformers' Trainer on adapters of PEFT: it saves what the stock Trainer saves, and resumes from it."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import preload, run_ranks
from test_asked_by_others import make_llama
from whole import whole

preload("transformers.models.llama.modeling_llama", "transformers.trainer", "peft")

MIDDLE, END = 2, 4
ADAPTERS = "adapter_model.safetensors"


def make_adapted() -> Any:
    """A model with LoRA, whose head is trained as well, and is saved with the adapters."""
    import peft

    base = make_llama()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, config)


def train(rank: int, strategy: str | None, folder: str) -> None:
    """Train to the middle and save, then resume in another Trainer; without a strategy, in this process alone."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.integrations import ShardwiseTrainer

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            control.should_training_stop = state.global_step >= MIDDLE

    def make(*callbacks: Any) -> Any:
        args = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=END, save_steps=MIDDLE, report_to=[], disable_tqdm=True,
            learning_rate=1e-2, per_device_train_batch_size=4 if strategy is None else 2,
        )  # fmt: skip
        data = [{"input_ids": torch.arange(4) + n % 9, "labels": torch.arange(4) + n % 7} for n in range(24)]
        given = {"model": make_adapted(), "args": args, "train_dataset": data, "callbacks": list(callbacks)}
        trainer = transformers.Trainer(**given) if strategy is None else ShardwiseTrainer(**given, plan=strategy)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    num_ranks = torch.distributed.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    with patch.dict(os.environ, {name: str(number) for name, number in place.items()}):
        try:
            make(Stops()).train()
            make().train(resume_from_checkpoint=True)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp", "zero2")])
def test_adapters_and_a_trained_head_are_saved_and_resumed_as_by_the_stock_trainer_alone(
    strategy: str, tmp_path: Path
) -> None:
    for package in ("transformers", "accelerate", "peft"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    import peft
    from safetensors.torch import load_file

    ours, stock = tmp_path / "ours", tmp_path / "stock"
    run_ranks(train, num_ranks=2, args=(strategy, str(ours)), timeout_seconds=110.0)
    run_ranks(train, num_ranks=1, args=(None, str(stock)), timeout_seconds=110.0)
    for step in (MIDDLE, END):
        saved, expected = (folder / f"checkpoint-{step}" for folder in (ours, stock))
        files = {path.name for path in saved.iterdir()} - {"rng_state_0.pth", "rng_state_1.pth"}
        assert files == {path.name for path in expected.iterdir()} - {"rng_state.pth"}
        found, wanted = load_file(saved / ADAPTERS), load_file(expected / ADAPTERS)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    loaded = peft.PeftModel.from_pretrained(make_llama(), ours / f"checkpoint-{END}").state_dict()
    (head,) = (value for name, value in found.items() if "lm_head" in name)
    assert torch.equal(loaded["base_model.model.lm_head.modules_to_save.default.weight"], head)
    assert not torch.equal(loaded["base_model.model.lm_head.original_module.weight"], head)
