"""How a rank fails: it says so itself, at once, in a file; the launcher tells the user of the one that was first.

When one rank raises, its peers lose a connection or wait for it in vain, and raise as well. So that the cause is
shown and not an echo of it, each report carries the time of a clock that all processes of a machine share, and
says whether it only tells of a peer.

No torch here, and torch's classes by name: a rank must be able to tell that it could not even import it.
"""

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.comm.rank_progress import PROGRESS
from shardwise.errors import ShardwiseError
from shardwise.files.atomic import atomic_write
from shardwise.files.regular_file import open_to_append

# A rank that has failed ends by itself within this time, whatever its threads and destructors wait for.
LAST_WORDS_SECONDS = 3.0
# How many of the last lines of a rank that ended without a word are shown.
_NUM_LINES = 15
_NOTE = "during "
# Errors that tell of a peer, and errors that come from outside the program, by name, with all that derive from them.
_OF_A_PEER = frozenset({"DistError", "RanksDisagree", "RanksMissing"})
# Gloo has no error of its own, but names its files; ranks that agree on something pass on what one of them said.
_TELLS_OF_A_PEER = re.compile(r"/gloo/|\brank \d+ could not continue\b")
_FROM_OUTSIDE = frozenset({"OSError", "AcceleratorError", "DiskFailed", "RankStopped"})
_OF_THE_WATCHDOG = frozenset({"RankStopped"})
# Among these, what is the same when tried again.
_TO_STAY = frozenset(
    {"FileNotFoundError", "FileExistsError", "NotADirectoryError", "IsADirectoryError", "PermissionError"}
)

# The variable that names the file for what a rank writes.
LOG = "SHARDWISE_LOG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended.

    seconds   when, by the clock that all processes of a machine share
    mistake   the user can mend it (a ShardwiseError): shown in one line
    echo      it tells of a peer only: a lost connection, a rank that did not come
    killed    by a signal, without a word
    passing   it came from outside the program (a kill, the device, the disk, the network): a restart may help.
              What the program itself raises it raises again, since a run is deterministic.
    """

    rank: int
    seconds: float
    what: str
    where: str = ""
    traceback: str = ""
    mistake: bool = False
    echo: bool = False
    passing: bool = False
    killed: bool = False

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"rank {self.rank} failed first{place}: {self.what}"


def first(failures: Iterable[Failure]) -> Failure:
    """The cause: the earliest that is not an echo, else the earliest."""
    return min(failures, key=lambda failure: (failure.echo, failure.seconds))


@contextmanager
def during(what: str) -> Iterator[None]:
    """Errors raised inside carry `what` (`step 17`) into the report."""
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + what)
        raise


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """What there is to say of an error that has just been raised on this rank."""
    echo = any(_is_a(link, _OF_A_PEER) or _TELLS_OF_A_PEER.search(str(link)) for link in _chain(error))
    outside = _is_a(error, _FROM_OUTSIDE) and not _is_a(error, _TO_STAY)
    one_line = isinstance(error, ShardwiseError)
    mistake = one_line and not outside
    # Notes are added from the inside out, and are read from the outside in.
    notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    module = _module(error)
    return Failure(
        rank=rank,
        seconds=time.monotonic(),
        what=f"{type(error).__name__}: {error}",
        where=", ".join([*reversed(notes), *([module] if module else [])]),
        traceback="" if one_line else "".join(traceback.format_exception(error)),
        mistake=mistake,
        echo=echo,
        passing=(echo or outside) and not mistake,
    )


def report(error: BaseException, *, rank: int) -> None:
    """Say that this rank has failed, and see to it that it ends within a few seconds. Only the first call counts.

    The report goes where the elastic agent looks for it (ours, or torchrun's), so it is in the agent's format too.
    To be called before anything is torn down: peers must not notice before it is written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and Path(path).exists():
        return
    failure = failure_of(error, rank=rank)
    if PROGRESS.leave_record is not None and not _is_a(error, _OF_THE_WATCHDOG):
        # First: the launcher ends the job as soon as it has read the report. The watchdog has left one already.
        PROGRESS.leave_record(error)
    if path:
        details = {"py_callstack": failure.traceback or failure.what, "timestamp": str(int(time.time()))}
        told = {"message": {"message": failure.what, "extraInfo": details}, "shardwise": asdict(failure)}
        with atomic_write(path) as file:
            file.write(json.dumps(told).encode())
    if LOG in os.environ:
        # Rank 0 speaks on the terminal; what the launcher shows there was first, which this may not be.
        write_to_log(2)
    # A thread of C that needs no interpreter lock: a group's destructor may wait for peers that never come.
    faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True)


@contextmanager
def stalls_reported() -> Iterator[None]:
    """In here the watchdog (comm/watch.py) reports the rank that stopped before it ends this process."""
    before, PROGRESS.on_stall = PROGRESS.on_stall, lambda error, rank: report(error, rank=rank)
    try:
        yield
    finally:
        PROGRESS.on_stall = before


def write_to_log(*descriptors: int) -> None:
    """From now on what is written to `descriptors` (1: output, 2: errors) goes into this rank's log."""
    log = open_to_append(Path(os.environ[LOG]))
    for descriptor in descriptors:
        os.dup2(log, descriptor)
    os.close(log)


def reported(path: Path) -> Failure | None:
    """The failure that a rank has written to `path`, if it has."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return Failure(**json.loads(text)["shardwise"])


def ended(code: int, *, rank: int, log: str) -> Failure:
    """The failure of a rank whose process is gone without a report. `code` < 0: by that signal."""
    by_signal = code < 0
    lines = log.splitlines()[-_NUM_LINES:]
    early = " while other ranks were still running" if code == 0 else ""
    return Failure(
        rank=rank,
        seconds=time.monotonic(),
        what=f"the process was killed by {_name(-code)}"
        if by_signal
        else f"the process ended with exit code {code}{early}",
        traceback="\n".join(["its last lines:", *lines]) if lines else "",
        mistake=code == 2,
        passing=by_signal,
        killed=by_signal,
    )


def _name(number: int) -> str:
    # Real-time signals have numbers only.
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that …"""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_a(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _module(error: BaseException) -> str:
    """The innermost module whose forward was running, by the name that the outermost one has for it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    holders = [frame.f_locals.get("self") for frame in frames]
    modules: list[Any] = [holder for holder in holders if hasattr(holder, "named_modules")]
    if not modules:
        return ""
    return next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")
