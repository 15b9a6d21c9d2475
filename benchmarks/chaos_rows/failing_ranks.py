"""Row 12: one rank goes wrong, at any point; all end, and the user sees why."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import shown_points
import test_launch_train as in_training
from scorecard import Asked, Fault, Tally


@contextmanager
def errors_of_jobs() -> Iterator[list[str]]:
    """What is written to standard error in the block, also by its processes; in the list when the block is over."""
    told: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield told
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            told.append(file.read().decode(errors="replace"))


def one_rank_raises(asked: Asked) -> Tally:
    tally = Tally()
    for number, point in enumerate(shown_points.SHOWN):
        with tally.trying(point):
            folder = _folder(asked, number)
            with patch.dict(os.environ, {"POINT_FOLDER": str(folder)}), errors_of_jobs() as errors:
                code = shown_points.launch_point(point, folder, failing=shown_points.failing_rank(point))
            shown_points.check_ended(point, folder, code=code, errors=errors[0])
    points = list(in_training.SHOWN) if asked.long else ["forward", "backward", "the optimizer"]
    for point in points:
        with tally.trying(f"in training, {point}"):
            folder = _folder(asked, point)
            with errors_of_jobs() as errors:
                code = in_training.broken_at(point, folder)
            in_training.check_broken(point, folder, code=code, errors=errors[0])
    return tally


def _folder(asked: Asked, name: object) -> Path:
    folder = asked.folder / str(name)
    folder.mkdir()
    return folder


ROWS = [
    Fault(
        name="12",
        shows="one rank raises, exits or is killed at 32 points (short: 30)",
        must_be="all end in < 10 s, the true cause shown, no orphans",
        run=one_rank_raises,
    )
]
