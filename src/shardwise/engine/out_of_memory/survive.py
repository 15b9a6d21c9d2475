"""A step in which a rank may run out of memory: all ranks hear of it before anyone updates, and the step is undone.

    guard.begin()
    for batch in batches:
        loss = guard.run(lambda: one_pass(batch))      # None on a rank that has run out
    guard.agree()                                      # raises StepUndone on all ranks
    optimizer.step()

A rank that runs out in forward or backward drops its graph and takes part in the rest (Core.finish_pass).
"""

import gc
import traceback
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.engine import engine_of
from shardwise.engine.out_of_memory.undo import StepStart
from shardwise.errors import ShardwiseError


class StepUndone(ShardwiseError):  # noqa: N818
    """Ranks ran out of memory in a step, which was undone on all of them. `failures`: rank → a line."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__("; ".join(failures.values()))
        self.failures = dict(failures)


class NoGuard:
    """Steps whose errors end the job. `undoes`: whether a step may be undone, and run again."""

    undoes = False

    def begin(self) -> None: ...

    def run(self, one_pass: Callable[[], Tensor]) -> Tensor | None:
        return one_pass()

    def agree(self) -> None: ...


class StepGuard(NoGuard):
    """The steps of one model."""

    undoes = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engine = engine_of(model)
        self._start: StepStart | None = None
        # Collectives of the job's own group in the passes of a step: whether they are somebody else's.
        self._num_foreign = 0
        self._num_before = 0

    def begin(self) -> None:
        self._start = StepStart(self._model, self._engine)
        self._num_before = _num_collectives()

    def run(self, one_pass: Callable[[], Tensor]) -> Tensor | None:
        """A forward and its backward; or, where this rank has run out of memory, its part in those of the others."""
        core = self._engine.core
        passes = core.passes
        if not passes.failed:
            try:
                return one_pass()
            except torch.OutOfMemoryError as error:
                if self._num_foreign or core.num_forwards > 1:
                    error.add_note(
                        "  this step could not be undone: its passes have collectives of their own, or more than one "
                        "forward; the other ranks wait for them"
                    )
                    raise
                passes.failed = _told(error)
                # What was computed so far is held by the frames that the error came through.
                traceback.clear_frames(error.__traceback__)
        gc.collect()
        core.finish_pass()
        return None

    def agree(self) -> None:
        """After the last pass, before anything of the update: StepUndone if any rank has run out of memory."""
        engine = self._engine
        failures = engine.guards.same_order.take_failures()
        engine.core.passes.failed = ""
        if not failures:
            was_learned = self._start is not None and self._start.learned
            self._num_foreign = _num_collectives() - self._num_before if was_learned else 0
            return
        assert self._start is not None
        self._start.undo()
        raise StepUndone(failures)

    def drop(self) -> None:
        """Undo a step in which no rank has failed, instead of its update: it was only a rehearsal."""
        assert self._start is not None
        self._start.undo(keeps_order=True)

    @property
    def copied_bytes(self) -> int:
        """What it holds of the device's memory, so that a step can be undone."""
        return self._start.copied_bytes if self._start is not None else 0


def _told(error: torch.OutOfMemoryError) -> str:
    """The first line of what the engine knows of it (out_of_memory.py)."""
    notes = getattr(error, "__notes__", None) or [f"rank {dist.get_rank()} ran out of memory"]
    return str(notes[0]).splitlines()[0]


def _num_collectives() -> int:
    """That were issued in the job's own group, as its backend counts them."""
    world = dist.group.WORLD
    assert world is not None
    try:
        return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        # A backend that does not count.
        return 0
