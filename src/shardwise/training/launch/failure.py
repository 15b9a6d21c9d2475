"""Reports why a rank failed: the rank writes a file at once, and the launcher shows the failure that came first.

When one rank raises, its peers lose a connection or wait for it in vain, and raise as well. To show the cause and not
such an echo, each report carries the time of a clock that all processes of a machine share, and says whether it is only
about a peer, and about which one if it names it.

No torch here, and torch's classes by name: a rank must be able to report that it could not import torch.
"""

import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, open_to_append, read_json
from shardwise.base.vocabulary.process_output import own_lines
from shardwise.comm.groups.rank_progress import PROGRESS

# A rank that has failed exits within this time, whatever its threads and destructors wait for.
LAST_WORDS_SECONDS = 3.0
# How many of its last lines are shown of a rank that ended without a report.
_NUM_LINES = 15
_NOTE = "during "
_AVOIDED = "  the next start "
# Names of errors about a peer; classes derived from them count too.
_OF_A_PEER = frozenset({"DistError", "RanksDisagree", "RanksMissing"})
# Gloo has no error class, but names its files.
_OF_GLOO = "/gloo/"
# Errors that come from outside the program.
_FROM_OUTSIDE = frozenset({"OSError", "AcceleratorError", "DiskFailed", "RankStopped"})
_OF_THE_WATCHDOG = frozenset({"RankStopped"})
# Among these, the ones that would occur again after a restart.
_PERMANENT = frozenset(
    {"FileNotFoundError", "FileExistsError", "NotADirectoryError", "IsADirectoryError", "PermissionError"}
)

# The variable that names the log file of a rank.
LOG = "SHARDWISE_LOG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a rank ended.

    seconds   when, by the clock that all processes of a machine share
    mistake   a user's mistake (a ShardwiseError), shown in one line
    echo      it is only about a peer: a lost connection, a rank that did not come
    peer      the rank that an echo names
    killed    by a signal, without a report
    passing   it came from outside the program (a kill, the device, the disk, the network), or the next start avoids
              it, so a restart may help; any other error would occur again, since a run is deterministic
    notes     further lines of the error
    """

    rank: int
    seconds: float
    what: str
    where: str = ""
    traceback: str = ""
    mistake: bool = False
    echo: bool = False
    peer: int | None = None
    passing: bool = False
    killed: bool = False
    notes: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"rank {self.rank} failed first{place}: {self.what}"


def first(failures: Iterable[Failure]) -> Failure:
    """Return the cause: the earliest failure that is not an echo, else the earliest echo of a rank without a report."""
    found = list(failures)
    ranks = {failure.rank for failure in found}
    return min(found, key=lambda failure: (failure.echo, failure.peer in ranks, failure.seconds))


@contextmanager
def during(what: str) -> Iterator[None]:
    """Add `what` (`step 17`) to the report of errors raised in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + what)
        raise


def avoided_next(error: BaseException, how: str) -> None:
    """Note on an error that the next start avoids it ("the next start …"), so that a launcher starts again."""
    error.add_note(f"{_AVOIDED}{how}")


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Describe an error that was just raised on this rank."""
    chain = list(_chain(error))
    peer = next((link.peer for link in chain if isinstance(link, ShardwiseError) and link.peer is not None), None)
    echo = peer is not None or any(_is_a(link, _OF_A_PEER) or _OF_GLOO in str(link) for link in chain)
    outside = _is_a(error, _FROM_OUTSIDE) and not _is_a(error, _PERMANENT)
    one_line = isinstance(error, ShardwiseError)
    mistake = one_line and not outside
    # Notes are added from the inside out, and read from the outside in.
    notes = getattr(error, "__notes__", [])
    during = [note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)]
    avoided = any(note.startswith(_AVOIDED) for note in notes)
    module = _module(error)
    return Failure(
        rank=rank,
        seconds=time.monotonic(),
        what=f"{type(error).__name__}: {error}",
        where=", ".join([*reversed(during), *([module] if module else [])]),
        traceback="" if one_line else "".join(traceback.format_exception(error)),
        mistake=mistake,
        echo=echo,
        peer=peer,
        passing=(echo or outside or avoided) and not mistake,
        notes="\n".join(note for note in notes if not note.startswith(_NOTE)),
    )


def report(error: BaseException, *, rank: int) -> None:
    """Report that this rank has failed, and make it exit within a few seconds. Only the first call counts.

    The report is written where the elastic agent (ours, or torchrun's) looks for it, in the agent's format. Call this
    before anything is torn down: peers must not notice before the report is written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and Path(path).exists():
        return
    failure = failure_of(error, rank=rank)
    if PROGRESS.leave_record is not None and not _is_a(error, _OF_THE_WATCHDOG):
        # First: the launcher ends the job once it has read the report. The watchdog has written its record already.
        PROGRESS.leave_record(error)
    if path:
        details = {"py_callstack": failure.traceback or failure.what, "timestamp": str(int(time.time()))}
        content = {"message": {"message": failure.what, "extraInfo": details}, "shardwise": asdict(failure)}
        with atomic_write(path) as file:
            file.write(json.dumps(content).encode())
    if LOG in os.environ:
        # Rank 0 writes to the terminal, where the launcher will show the first failure, which may not be this one.
        write_to_log(2)
    # A C thread without the interpreter lock: a group's destructor may wait for peers that never come.
    faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True)


def announce_exit(code: int) -> None:
    """Note the exit code that this rank ends with: peers notice at once, but an interpreter may take long to end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with atomic_write(_code_path(path)) as file:
            file.write(str(code).encode())


@contextmanager
def stalls_reported() -> Iterator[None]:
    """In this block, have the watchdog (comm/watch/watch.py) report the rank that stopped before this process ends."""
    before, PROGRESS.on_stall = PROGRESS.on_stall, lambda error, rank: report(error, rank=rank)
    try:
        yield
    finally:
        PROGRESS.on_stall = before


def write_to_log(*descriptors: int) -> None:
    """Redirect `descriptors` (1: output, 2: errors) into this rank's log."""
    log = open_to_append(Path(os.environ[LOG]))
    for descriptor in descriptors:
        os.dup2(log, descriptor)
    os.close(log)


def reported(path: Path) -> Failure | None:
    """Read the failure that a rank has written to `path`, if any."""
    found = _read(path)
    return None if found is None else Failure(**found["shardwise"])


def announced(path: Path) -> int | None:
    """Return the exit code that a rank whose report is at `path` has announced, if any."""
    found = _read(_code_path(path))
    return None if found is None else int(found)


def _read(path: str | Path) -> Any:
    """Return the value in a JSON file of a rank; None if there is no such file."""
    try:
        return read_json(path, most_bytes=2**26, finite=False)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise


def _code_path(report: str | Path) -> str:
    return f"{report}.code"


def ended(code: int, *, rank: int, log: str, noticed_by: int | None = None) -> Failure:
    """Describe the failure of a rank that ended without a report. `code` < 0: killed by that signal."""
    by_signal = code < 0
    lines = own_lines(log)[-_NUM_LINES:]
    how = f"was killed by {_name(-code)}" if by_signal else f"ended with exit code {code}"
    if code == 0:
        how += " while other ranks were still running"
    elif noticed_by is not None and not by_signal:
        how += f" and left no report; rank {noticed_by} noticed first"
    return Failure(
        rank=rank,
        seconds=time.monotonic(),
        what=f"the process {how}",
        traceback="\n".join(["its last lines:", *lines]) if lines else "",
        mistake=code == 2,
        passing=by_signal,
        killed=by_signal,
    )


def _name(number: int) -> str:
    # Real-time signals have no names.
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that …"""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_a(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _module(error: BaseException) -> str:
    """Return the name, in the outermost module, of the innermost module whose forward was running."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    holders = [frame.f_locals.get("self") for frame in frames]
    modules: list[Any] = [holder for holder in holders if hasattr(holder, "named_modules")]
    if not modules:
        return ""
    return next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")
