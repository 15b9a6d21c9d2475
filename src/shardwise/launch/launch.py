"""Starts a job's ranks on this machine, watches over them, and tells the user how it ended.

    launch ──▶ Agent ──▶ rank 0 … rank N-1, each `python -m shardwise.launch.rank_process PROGRAM ARGUMENTS…`

Exit codes: 0 all ranks ended well, also after SIGTERM; 1 a rank failed; 2 a user's mistake; 130 after ^C;
128 + signal if a signal ended the job before all ranks had saved.
"""

import fcntl
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from shardwise.errors import ShardwiseError
from shardwise.launch.agent import Agent, Files, JobFailed, JobStopped

LOGS = "logs"
"""The folder, in a run's own, of what each rank writes."""
# How the names of private folders begin.
_PRIVATE = "shardwise-"


class InvalidFolder(ShardwiseError):  # noqa: N818
    """A run folder that cannot be used: not to be written, or in use by another job."""


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    max_restarts: int,
    folder: Path,
    grace_seconds: float = 60.0,
    program: str = "shardwise",
) -> int:
    """Run `python -m program arguments…` on `num_ranks` local ranks; the exit code to end with.

    When a rank is killed, or the device, the disk or the network failed it, all ranks are started again, at most
    `max_restarts` times; any other failure ends the job. SIGTERM and ^C are passed on to the ranks as SIGTERM, and they
    have `grace_seconds` to end. Only the main thread can call this.
    """
    try:
        told = run_job(
            arguments,
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            folder=folder,
            grace_seconds=grace_seconds,
            program=program,
        )
    except JobFailed as end:
        failure = end.failure
        below = "" if failure.mistake else f"what each rank wrote: {folder / LOGS}/rank-*.txt"
        print("\n".join(filter(None, (str(failure), failure.traceback.rstrip(), below))), file=sys.stderr)
        return 2 if failure.mistake else 1
    except JobStopped as end:
        print(end, file=sys.stderr)
        return 128 + end.number
    return 128 + signal.SIGINT if told == signal.SIGINT else 0


def run_job(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    max_restarts: int,
    folder: Path,
    grace_seconds: float,
    program: str,
) -> signal.Signals | None:
    """As `launch`, which tells the user; here the end is a value: the signal after which all ranks ended well, if one
    came. Raises JobFailed, with what the first rank that failed said, or JobStopped.
    """
    with _claimed(folder) as private, _restored():
        agent = Agent(
            (program, *arguments),
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            files=Files(private=private, logs=folder / LOGS),
            grace_seconds=grace_seconds,
        )
        try:
            agent.run()
        except SignalException as end:
            # While the ranks were being started.
            raise JobStopped(signal.Signals(end.sigval)) from end
    return agent.stopped_by


@contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """Hold the run folder for this job, and a private one, on a local disk, for what its ranks exchange.

    The kernel gives the lock up when this process ends in whatever way. The lock's file names the private folder, so
    that the next launch removes what a killed one has left.
    """
    with ExitStack() as held:
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / ".lock").open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidFolder(f"another job is writing into {folder}: wait for it, or choose another --run") from None
        except OSError as error:
            raise InvalidFolder(f"{folder}: cannot be written ({error.strerror}): choose another --run") from error
        file.seek(0)
        left = Path(file.read())
        if left.name.startswith(_PRIVATE):
            shutil.rmtree(left, ignore_errors=True)
        file.truncate(0)
        private = held.enter_context(tempfile.TemporaryDirectory(prefix=_PRIVATE))
        held.callback(file.truncate, 0)
        file.write(private)
        file.flush()
        yield Path(private)


@contextmanager
def _restored() -> Iterator[None]:
    """Signal handlers as they were, once the agent has had them; its warnings go nowhere, `launch` does the telling."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    log = logging.getLogger("torch.distributed.elastic")
    propagate, log.propagate = log.propagate, False
    silence = logging.NullHandler()
    log.addHandler(silence)
    try:
        yield
    finally:
        log.removeHandler(silence)
        log.propagate = propagate
        for number, handler in before.items():
            signal.signal(number, handler)
