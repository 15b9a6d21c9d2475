"""Running the command line in this process: what it said, and how it ended."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from shardwise.doors.cli.app import main


class Accepted(Exception):  # noqa: N818
    """A command that would have started a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


def command(*arguments: str) -> Answer:
    """Run `shardwise …`; where it would launch ranks it raises Accepted."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch("shardwise.training.launch.launch.launch", side_effect=Accepted),
    ):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Answer(code=code, out=out.getvalue(), err=err.getvalue())
