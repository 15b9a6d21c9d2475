"""A run that is out of memory is started again under a smaller plan, as often as `train.survive` says.

The rank that ran out notes it in auto.json and fails. The job ends as for any rank that fails, and the launcher starts
it again. Then rank 0 finds a plan that is predicted to need less (auto_plan.py), and the run resumes under it from its
newest state: a snapshot in memory, or a checkpoint. Without a launcher, the next start of the same command does that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.training.fitting.auto_plan import ChosenPlan
from shardwise.training.fitting.memory_advice import advice
from shardwise.training.launch.failure import avoided_next


@contextmanager
def memory_handled(chosen: ChosenPlan) -> Iterator[None]:
    """Note that memory ran out in this block, for the next start; if the run may not change its plan, add advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            restarts = chosen.note_ran_out(_described(error, rank=chosen.place.rank))
        except OSError as failed:
            error.add_note(f"  no smaller plan will be taken: {failed}")
            restarts = False
        if restarts:
            avoided_next(error, "resumes under a smaller plan, from the newest state")
        else:
            error.add_note(advice(chosen.config, place=chosen.place))
        raise


def _described(error: torch.OutOfMemoryError, *, rank: int) -> str:
    """Return the first line of the engine's explanation (engine/out_of_memory.py)."""
    notes = getattr(error, "__notes__", None) or [f"rank {rank} ran out of memory"]
    return str(notes[0]).splitlines()[0]
