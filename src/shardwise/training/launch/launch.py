"""Starts a job's ranks on this machine, watches over them, and reports how it ended.

    launch ──▶ Agent ──▶ rank 0 … rank N-1, each `python -m shardwise.training.launch.rank_process PROGRAM ARGUMENTS…`

Exit codes: 0 success, also after SIGTERM, SIGHUP or SIGUSR1; 1 a rank failed; 2 a user's mistake; 130 after ^C; 128 +
signal if a signal ended the job before all ranks had saved.
"""

import errno
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from shardwise.base.vocabulary.printable import printable_lines
from shardwise.state.recovery.memory_folder import snapshots_of_launch
from shardwise.training.launch.agent import Agent, JobFailed, JobStopped
from shardwise.training.launch.folder_lock import InvalidFolder, locked
from shardwise.training.launch.private_folder import private_folder
from shardwise.training.launch.rank_files import RankFiles
from shardwise.training.launch.stop_signals import STOP_SIGNALS

LOGS = "logs"
"""The folder with the ranks' logs, in the run folder."""


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    max_restarts: int,
    folder: Path,
    grace_seconds: float = 60.0,
    program: str = "shardwise",
    imports: Sequence[str] = (),
) -> int:
    """Run `python -m program arguments…` on `num_ranks` local ranks, and return the exit code.

    If a rank is killed, or fails because of the device, the disk or the network, or if the next start avoids its
    failure, all ranks are started again, at most `max_restarts` times; any other failure ends the job. STOP_SIGNALS and
    ^C are passed on to the ranks as SIGTERM, and they have `grace_seconds` to exit. `imports` are modules of the
    program that a restart need not import again. Only the main thread can call this.
    """
    try:
        stopped_by = run_job(
            arguments,
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            folder=folder,
            grace_seconds=grace_seconds,
            program=program,
            imports=imports,
        )
    except JobFailed as end:
        failure = end.failure
        below = "" if failure.mistake else f"what each rank wrote: {folder / LOGS}/rank-*.txt"
        lines = "\n".join(filter(None, (str(failure), failure.traceback.rstrip(), below)))
        print(printable_lines(lines), file=sys.stderr)
        return 2 if failure.mistake else 1
    except JobStopped as end:
        print(end, file=sys.stderr)
        return 128 + end.number
    return 128 + signal.SIGINT if stopped_by == signal.SIGINT else 0


def run_job(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    max_restarts: int,
    folder: Path,
    grace_seconds: float,
    program: str,
    imports: Sequence[str] = (),
) -> signal.Signals | None:
    """Run a job as `launch` does, without reporting. Return the signal after which all ranks ended well, if any.

    Raises JobFailed, with the report of the first rank that failed, or JobStopped.
    """
    with _claimed(folder) as private, snapshots_of_launch() as key, _restored():
        agent = Agent(
            (program, *arguments),
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            files=RankFiles(private=private, logs=folder / LOGS, snapshots=key),
            grace_seconds=grace_seconds,
            imports=imports,
        )
        try:
            agent.run()
        except SignalException as end:
            # It came while the ranks were being started.
            raise JobStopped(signal.Signals(end.sigval)) from end
        finally:
            agent.close()
    return agent.stopped_by


@contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """Lock the run folder, and make a private one on a local disk for what the ranks exchange."""
    with locked(folder):
        try:
            (folder / LOGS).mkdir(exist_ok=True)
            if (folder / LOGS).is_symlink():
                raise OSError(errno.ELOOP, "is a link; the ranks' logs are not written through one: remove it")
        except OSError as error:
            raise InvalidFolder(f"{folder / LOGS}: cannot be written ({error.strerror})") from error
        with private_folder() as private:
            yield private


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces, and drop its warnings, since `launch` reports itself."""
    numbers = (*STOP_SIGNALS, signal.SIGINT, signal.SIGQUIT)
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
