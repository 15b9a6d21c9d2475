"""transformers' Trainer with `memory`: what is interrupted continues from memory, and ends as what was not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from test_asked_by_others import make_llama
from whole import whole

from shardwise.state.recovery.memory_folder import free_memory
from shardwise.state.recovery.memory_key import key_in

preload("transformers.models.llama.modeling_llama", "transformers.trainer")

MAX_STEPS = 8


class Interrupted(Exception):  # noqa: N818
    """What ends a training early."""


def trained(rank: int, strategy: str, folder: str, *, memory: int, stop_after: int | None) -> dict[str, Any]:
    """Train, or begin to; return the first step, and the state at the end."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.integrations import ShardwiseTrainer

    steps: list[int] = []

    class Watches(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            steps.append(state.global_step + 1)
            if stop_after is not None and state.global_step == stop_after:
                raise Interrupted

    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=MAX_STEPS, report_to=[], disable_tqdm=True, save_strategy="no",
        learning_rate=1e-2, lr_scheduler_type="linear", per_device_train_batch_size=2, logging_steps=1,
    )  # fmt: skip
    torch.manual_seed(0)
    data = [{"input_ids": torch.arange(4) + n % 9, "labels": torch.arange(4) + n % 7} for n in range(24)]
    try:
        trainer = ShardwiseTrainer(
            model=make_llama(), args=args, train_dataset=data, callbacks=[Watches()], plan=strategy, memory=memory
        )
        trainer.remove_callback(transformers.PrinterCallback)
        try:
            trainer.train()
        except Interrupted:
            return {"first": steps[0]}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"first": steps[0], "losses": losses, "weights": trainer.model.state_dict()}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def interrupted_and_continued(rank: int, strategy: str, folder: str) -> tuple[Any, Any]:
    alone = trained(rank, strategy, f"{folder}/alone", memory=0, stop_after=None)
    trained(rank, strategy, f"{folder}/run", memory=2, stop_after=5)
    return alone, trained(rank, strategy, f"{folder}/run", memory=2, stop_after=None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    key = key_in(tmp_path / "run")
    if key is not None:
        free_memory(key)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp", "zero2")])
def test_a_trainer_that_is_interrupted_continues_from_memory_bit_for_bit(strategy: str, folder: Path) -> None:
    pytest.importorskip("transformers")
    found = run_ranks(interrupted_and_continued, num_ranks=2, args=(strategy, str(folder)), timeout_seconds=110.0)
    for alone, again in found:
        assert alone["first"] == 1
        assert 3 < again["first"] <= 6
        # With what was logged before the interruption.
        assert again["losses"] == alone["losses"]
        for name, value in alone["weights"].items():
            assert torch.equal(again["weights"][name], value), name
    assert not list(Path("/dev/shm").glob(f"shardwise-{key_in(folder / 'run')}"))
