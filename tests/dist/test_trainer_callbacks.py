"""Callbacks of the Trainer that read or write parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from test_asked_by_others import make_llama
from torch import Tensor
from whole import whole

preload("transformers.models.llama.modeling_llama", "transformers.trainer")

ALPHA = 0.25


def train(rank: int, strategy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the reference model, the trained model): after each step the first is moved towards the second."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.integrations import ShardwiseTrainer

    class Synchronises(transformers.TrainerCallback):
        """As TRL's SyncRefModelCallback does it."""

        @staticmethod
        def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
            for ours, theirs in zip(target_model.parameters(), model.parameters(), strict=True):
                ours.data.mul_(1.0 - alpha).add_(theirs.data, alpha=alpha)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **options: Any) -> None:
            self.sync_target_model(model, reference, ALPHA)
            kept.append({name: value.clone() for name, value in model.state_dict().items()})

    kept: list[dict[str, Tensor]] = []
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, max_steps=2, **quiet)
    data = [{"input_ids": torch.arange(4) + n, "labels": torch.arange(4) + n} for n in range(8)]
    model = make_llama()
    # The Trainer clears gradients from before, before its first step.
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    try:
        trainer = ShardwiseTrainer(
            model=model, args=args, train_dataset=data, callbacks=[Synchronises()], plan=strategy
        )
        reference = trainer.accelerator.prepare_model(make_llama(), evaluation_mode=True)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        expected = make_llama().state_dict()
        for trained in kept:
            expected = {name: value * (1.0 - ALPHA) + ALPHA * trained[name] for name, value in expected.items()}
        return reference.state_dict(), expected
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp", "zero2")])
def test_a_reference_model_follows_the_trained_one_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found, expected in run_ranks(train, num_ranks=2, args=(strategy, str(tmp_path)), timeout_seconds=100.0):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
