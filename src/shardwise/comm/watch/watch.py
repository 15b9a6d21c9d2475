"""The watchdog: when a rank stops, every rank that is still alive names it, and the job ends.

In each process, one thread compares how far the ranks have come (rank_progress.py, stall.py). A second thread exchanges
the standings over the job's store, on a separate connection: a store in a process that has stopped never answers, and
blocks its caller for ever. The main thread takes no part, since it may be stuck in a backend's wait.

    every second            check whether this rank has issued anything
    every few seconds       write this rank's standing
    while it is idle        exchange standings: does any rank wait in a call that another one has passed by? If this one
                            waits, also compare what the ranks have issued
    at a fifth of the limit log which rank is waited for
    at the limit            log which rank stopped, and where; end the process with exit code 124
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

import torch.distributed as dist

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import Store
from shardwise.comm.groups.agreement import RanksDisagree
from shardwise.comm.groups.groups import job_timeout
from shardwise.comm.groups.issued import disagreement, first_difference
from shardwise.comm.groups.rank_progress import PROGRESS, Standing
from shardwise.comm.groups.small_collectives import from_first
from shardwise.comm.watch.barrier import in_barrier
from shardwise.comm.watch.noticeboard import History, Noticeboard
from shardwise.comm.watch.pace import Pace
from shardwise.comm.watch.record_writer import RECORDS
from shardwise.comm.watch.stall import Stall, find_missed, find_stall

# One rank may save, evaluate or download for minutes while the others wait; NCCL gives up after 600 s.
WATCH_SECONDS = 300.0
EXIT_CODE = 124

Issues = Callable[[], dict[int, dict[str, list[str]]]]
"""Returns what a rank has issued lately: number of the comparison → group → names."""


class RankStopped(ShardwiseError):  # noqa: N818
    """A rank did not come to its next operation in time."""


def check_watch_seconds(seconds: float) -> None:
    if not seconds >= 0:
        raise InvalidPlan(f"watch_seconds = {seconds!r}: must be a number of seconds, or 0 to turn the watchdog off")


def watch_over(user: object, *, limit_seconds: float, waits_on_host: bool, issues: Issues) -> None:
    """Watch this job as long as `user` exists. Collective: every rank calls it at the same point of its program."""
    PROGRESS.restart()
    if not limit_seconds or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    store = torch_private.default_store()
    # Keeps this model apart from what earlier ones of the job have left in the store.
    token = from_first(uuid4().hex)

    def history() -> History:
        return {f"{token}/{number}": logs for number, logs in issues().items()}

    with _CHANGES:
        running = _RUNNING[-1] if _RUNNING else None
        users = {} if running is None else running.users
        # First: the last user before this one may be collected at any moment, which would stop the watchdog.
        users[id(user)] = history
        if running is None or not running.watches(store, limit_seconds=limit_seconds):
            # There is none, or it is of another job or has another limit: the latest request counts.
            if running is not None:
                running.stop()
            watch = Watch(store, limit_seconds=limit_seconds, waits_on_host=waits_on_host, users=users)
            _RUNNING.append(watch)
            watch.start()
    weakref.finalize(user, _drop_user, id(user)).atexit = False


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last standing that another rank wrote, and when it was first read here."""

    number: int
    standing: Standing
    seconds: float


class Watch:
    """One process's watchdog."""

    def __init__(
        self, store: Store, *, limit_seconds: float, waits_on_host: bool, users: dict[int, Callable[[], History]]
    ) -> None:
        # By id; each returns what it has issued lately.
        self.users = users
        self._job_store = store
        self._asked_seconds = limit_seconds
        self._board = Noticeboard(store)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._waits_on_host = waits_on_host
        timeout = job_timeout()
        # End a little before the backend's own time-out, so that the rank is still named.
        most = timeout.total_seconds() if timeout is not None else float("inf")
        self._most_seconds = most - min(5.0, most / 10)
        self._seconds = min(limit_seconds, self._most_seconds)
        self._tick_seconds = min(1.0, self._seconds / 10)
        self._write_seconds = min(10.0, self._seconds / 6)
        self._silence_seconds = 3 * self._write_seconds + self._tick_seconds
        self._quiet_seconds = min(5.0, self._seconds / 3)
        self._stopped = threading.Event()
        self._hurry = threading.Event()
        self._pid = os.getpid()
        self._pace = Pace()
        self._warned_at = (0, 0, 0)
        # The other ranks, and when the store last answered.
        self._heard: dict[int, _Heard] = {}
        self._answered = time.monotonic()
        self._failing = False
        self._difference = ""
        # The stall that this rank is ending with, and the verdict of any rank, which it is to end with.
        self._found: Stall | None = None
        self._verdict: Stall | None = None
        self._threads = [
            threading.Thread(target=target, name=f"shardwise-watch-{name}", daemon=True)
            for name, target in (("clock", self._run_clock), ("store", self._run_store))
        ]

    def start(self) -> None:
        PROGRESS.explain = self._explain
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop without waiting for the threads: a garbage collection may call this on any of them."""
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        self._hurry.set()
        if self in _RUNNING:
            _RUNNING.remove(self)
            PROGRESS.explain = None

    def join(self) -> None:
        """Stop, and wait for the threads for a moment: the store may block one."""
        deadline = time.monotonic() + 10
        while self._found is not None and time.monotonic() < deadline:
            # The clock's thread is about to end this process with its own exit code.
            time.sleep(self._tick_seconds)
        self.stop()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def watches(self, store: Store, *, limit_seconds: float) -> bool:
        return store is self._job_store and limit_seconds == self._asked_seconds and not self._stopped.is_set()

    # The clock's thread

    def _run_clock(self) -> None:
        while not self._stopped.wait(self._tick_seconds):
            self._pace.note()
            if self._verdict is not None:
                self._end(self._verdict)
            idle = self._pace.idle_seconds
            warns = max(self._seconds / 5, self._quiet_seconds + self._write_seconds + self._tick_seconds)
            limit, why = self._pace.limit(self._asked_seconds, most_seconds=self._most_seconds)
            ends = idle >= limit
            if idle < warns or (not ends and self._warned_at == self._pace.position):
                continue
            stall = find_stall(
                self._standings(),
                limit_seconds=limit if ends else warns,
                silence_seconds=self._silence_seconds,
                waits_on_host=self._waits_on_host,
            )
            # So that the seconds in the line can be compared with what the user has set.
            asked = f"watch_seconds = {self._asked_seconds:g}" + (f", {why}" if why else "")
            if stall is not None and ends:
                self._end(replace(stall, text=f"{stall.text}; the limit is {limit:.0f} s ({asked})"))
            elif stall is not None:
                self._warned_at = self._pace.position
                self._log(f"{stall.text}; the job ends if this lasts {limit:.0f} s ({asked})")

    def _standings(self) -> list[Standing]:
        """Return where all ranks stand. A rank not heard from yet counts as silent since the wait began."""
        now = time.monotonic()
        store_seconds = now - self._answered
        # A store that does not answer hides all ranks; usually it is in the process of rank 0.
        store_is_silent = store_seconds >= self._silence_seconds
        found = []
        for rank in range(self._num_ranks):
            heard = self._heard.get(rank) or _Heard(0, Standing(rank=rank), now - self._pace.idle_seconds)
            age = now - heard.seconds
            silent = (store_seconds if rank == 0 else 0.0) if store_is_silent else age
            idle = heard.standing.idle_seconds + age
            found.append(replace(heard.standing, idle_seconds=idle, silent_seconds=silent))
        found[self._rank] = self._standing()
        return found

    def _standing(self) -> Standing:
        """Return where this rank stands."""
        idle = self._pace.idle_seconds
        waits = idle >= self._quiet_seconds and in_barrier()
        return replace(PROGRESS.standing(self._rank, idle_seconds=idle), in_barrier=waits)

    def _log(self, text: str) -> None:
        # Not through Python's buffers, whose locks a stuck thread may hold.
        os.write(2, f"shardwise [rank {self._rank}]: {text}\n".encode())

    def _end(self, stall: Stall) -> None:
        """Log the stall, give the others time to read it, and end this process, whatever its main thread does."""
        self._found = stall
        self._log(f"{stall.text}; this process ends with exit code {EXIT_CODE}")
        self._hurry.set()
        time.sleep(3 * self._tick_seconds)
        heard = {rank.rank: str(rank) for rank in self._standings() if rank.rank != self._rank}
        # Before the report: a launcher ends the job when it reads that.
        _run_briefly(partial(RECORDS.write, None, heard=heard))
        if PROGRESS.on_stall is not None:
            PROGRESS.on_stall(RankStopped(stall.text), stall.rank)
        _run_briefly(sys.stdout.flush)
        _run_briefly(sys.stderr.flush)
        os._exit(EXIT_CODE)

    # The store's thread

    def _run_store(self) -> None:
        next_write = 0.0
        # A store that ends, ends the job.
        with suppress(RuntimeError):
            while not self._stopped.is_set() and self._in_job():
                hurried = self._hurry.wait(self._tick_seconds)
                self._hurry.clear()
                now = time.monotonic()
                idle = self._pace.idle_seconds
                if hurried or now >= next_write or idle >= self._quiet_seconds:
                    next_write = now + self._write_seconds
                    self._board.write_standing(self._standing())
                if self._found is not None:
                    self._board.write_verdict(self._found)
                    return
                if hurried or idle >= self._quiet_seconds:
                    self._read(idle)
                self._answered = time.monotonic()
            # Also if the group is destroyed: the others may still wait for this rank, and the store may still be there.
            left = PROGRESS.standing(self._rank, idle_seconds=0.0)
            self._board.write_standing(replace(left, left=True))
        self._stopped.set()

    def _in_job(self) -> bool:
        """Return whether this process is still in the job: after that, the store may end with any rank."""
        return dist.is_initialized() and torch_private.default_store() is self._job_store

    def _read(self, idle: float) -> None:
        for rank, (number, standing) in self._board.read_standings().items():
            heard = self._heard.get(rank)
            if heard is None or heard.number != number:
                self._heard[rank] = _Heard(number, standing, time.monotonic())
        # In an ordinary step a rank waits for less than the duration of a step.
        waits = PROGRESS.waits_for != "" or not self._waits_on_host
        if self._failing or (waits and idle >= max(self._quiet_seconds, self._pace.slowest_seconds)):
            self._compare()
        self._verdict = self._verdict or self._board.read_verdict() or self._missed()

    def _missed(self) -> Stall | None:
        """Find a call that a rank has passed by, from standings that are all of this moment."""
        ranks = self._standings()
        current = all(rank.left or rank.silent_seconds <= 2 * self._tick_seconds for rank in ranks)
        return find_missed(ranks, quiet_seconds=self._quiet_seconds) if current else None

    def _compare(self) -> None:
        """Compare what waiting ranks have issued. A difference is certain to block them, so no limit is waited for."""
        mine: History = {}
        for user in list(self.users.values()):
            mine |= user()
        self._board.write_history(mine)
        histories = {self._rank: mine} | self._board.read_histories()
        for part in mine:
            parts = {rank: history[part] for rank, history in histories.items() if part in history}
            self._difference = self._difference or first_difference(parts, ended=False)
        if self._difference and not self._failing:
            self._verdict = Stall(rank=self._rank, text=disagreement(self._difference))

    # The main thread

    def _explain(self, error: RuntimeError) -> None:
        """Raise RanksDisagree if a collective failed because ranks issued different ones; wait a moment for theirs."""
        # A peer that is gone writes nothing more, unless it has left a verdict.
        gone = "Connection" in str(error)
        self._failing = not gone
        patience = 2 * self._tick_seconds if gone else self._quiet_seconds + 3 * self._tick_seconds
        deadline = time.monotonic() + patience
        while not self._stopped.is_set() and time.monotonic() < deadline:
            if self._failing and self._difference:
                raise RanksDisagree(disagreement(self._difference)) from error
            self._hurry.set()
            time.sleep(self._tick_seconds / 2)
            while self._verdict is not None or self._found is not None:
                # The clock's thread is about to end this process with its own exit code.
                time.sleep(self._tick_seconds)
        self._failing = False


def _run_briefly(call: Callable[[], None]) -> None:
    """Run `call` for at most a second: it may hang on a disk or on a lock of the main thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=1.0)


def _drop_user(user: int) -> None:
    with _CHANGES:
        for running in list(_RUNNING):
            running.users.pop(user, None)
            if not running.users:
                running.stop()


# At most one, since a process is one rank of one job.
_RUNNING: list[Watch] = []
# Reentrant: a garbage collection may drop a user on any thread, including one that holds the lock.
_CHANGES = threading.RLock()


@atexit.register
def _end_with_process() -> None:
    """Stop the threads: one that returns from the store while the interpreter ends would crash it."""
    for running in list(_RUNNING):
        running.join()
