"""Recovery from memory for transformers' Trainer.

The Trainer resumes from a folder: it reads trainer_state.json there, skips the batches that were seen, and calls its
methods to load the rest. For a snapshot in memory that folder holds trainer_state.json alone, and those methods load
from memory.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from shardwise.base.errors import CheckpointError
from shardwise.base.files.data_file import UnreadableFile, parse_json, read_json, read_text
from shardwise.base.files.form import WrongForm, whole
from shardwise.comm.groups.agreement import exchange
from shardwise.comm.groups.step_flags import StepFlags
from shardwise.comm.job.join import join_job
from shardwise.engine.random_states import random_states, restore_random_states
from shardwise.state.checkpoint.checkpoints import Loaded
from shardwise.state.recovery.finding import Generation
from shardwise.state.recovery.memory_key import key_for
from shardwise.state.recovery.recovery import Recovery

# The Trainer keeps every logged line in it.
_MOST_STATE_BYTES = 2**30


class TrainerRecovery:
    """Snapshots of one call of `trainer.train()`. Making it, and every method, is collective.

    output_dir   keeps the key of the snapshots
    """

    def __init__(self, output_dir: str, *, device: torch.device, every: int | None) -> None:
        join_job(device)
        self._device = device
        self._flags = StepFlags()
        self._is_first = torch.distributed.get_rank() == 0
        key = exchange(key_for(Path(output_dir)) if self._is_first else "")[0]
        self._recovery = Recovery(
            key=key, flags=self._flags, every=every, tell=lambda line: print(f"shardwise: {line}")
        )
        self._generation: Generation | None = None
        self._loaded: Loaded | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._last_step = -1

    def find(self, output_dir: str, *, asked: Any) -> Any:
        """Return what to resume from: a folder for the newest snapshot, unless a newer checkpoint was asked for."""
        self._generation = self._recovery.find()
        if self._generation is None:
            return asked
        named = get_last_checkpoint(output_dir) if asked is True else asked
        if named and _step_of(named) > self._generation.step:
            self._generation = None
            return asked
        state = self._generation.first_records()[0].contents.progress["trainer"]
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        Path(self._folder.name, TRAINER_STATE_NAME).write_text(json.dumps(state))
        if self._is_first:
            print(f"shardwise: resuming from memory after step {self._generation.step}")
        return self._folder.name

    def is_ours(self, folder: object) -> bool:
        """Return whether the Trainer is to load from memory."""
        return self._folder is not None and folder == self._folder.name

    def load(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        assert self._generation is not None
        self._loaded = self._recovery.load(self._generation, model, optimizer)
        if self._loaded is None:
            # The Trainer has taken over the step already.
            raise CheckpointError(
                "the snapshot in memory does not fit this model; remove snapshots.json from output_dir to start "
                "without it"
            )
        scheduler.load_state_dict(self._loaded.progress["scheduler"])

    def restore_random_states(self) -> None:
        if self._loaded is not None and self._loaded.own is not None:
            restore_random_states(self._loaded.own, device=self._device)

    def completed(self, model: nn.Module, optimizer: Optimizer, scheduler: Any, state: Any) -> None:
        """Take a snapshot if one is due. The Trainer may call it more than once for a step."""
        step = state.global_step
        if step == self._last_step:
            return
        self._last_step = step
        self._flags.exchange()
        if self._recovery.due(step):
            progress = {"trainer": parse_json(_text(state), finite=False), "scheduler": scheduler.state_dict()}
            self._recovery.take(model, optimizer, step=step, progress=progress, own=random_states(self._device))

    def close(self, *, free: bool) -> None:
        """End it; `free`: the training is over, and its snapshots go."""
        if free:
            self._flags.close()
            self._recovery.close()
        else:
            self._recovery.release()
        if self._folder is not None:
            self._folder.cleanup()


def _text(state: Any) -> str:
    """Return a TrainerState as the Trainer writes it."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        path = Path(folder, TRAINER_STATE_NAME)
        state.save_to_json(str(path))
        return read_text(path, most_bytes=_MOST_STATE_BYTES)


def _step_of(folder: str) -> int:
    path = Path(folder, TRAINER_STATE_NAME)
    try:
        # The Trainer writes NaN for a loss that diverged.
        return int(whole(least=0)(read_json(path, most_bytes=_MOST_STATE_BYTES, finite=False)["global_step"], ""))
    except (UnreadableFile, WrongForm, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not a state of the Trainer: {error}") from error
