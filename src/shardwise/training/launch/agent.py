"""torch's elastic agent for one machine, without a rendezvous or a listening port.

torch's LocalElasticAgent starts the ranks, watches them and starts them again. The differences:

    rendezvous   a single agent has no other to meet: no TCP store. The ranks meet over a file, a new one per start.
    failure      when a rank has failed, the others hang in a collective where no signal handler runs. torch's agent
                 waits 30 s for them; this one kills them as soon as the cause is known.
    signals      are passed on to the ranks, which save and exit; they do not interrupt the agent.
    start        ranks are forked from a process that has imported everything (warm_start.py).
"""

import os
import signal
import sys
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from shardwise.base.torch_internals import torch_private
from shardwise.base.vocabulary.printable import printable_lines
from shardwise.comm.autopsy.own_record import clear_records, clear_restarts, note_restart, path_of
from shardwise.training.launch.failure import LAST_WORDS_SECONDS, Failure, announced, ended, first, reported
from shardwise.training.launch.one_machine import OneMachine
from shardwise.training.launch.rank_files import RankEnvironments, RankFiles, num_threads
from shardwise.training.launch.stop_signals import STOP_SIGNALS
from shardwise.training.launch.warm_start import WarmStart, forking

_MONITOR_SECONDS = 0.05
# How long a rank that has failed has to report, from when another rank's error is about it. It may still be saving, or
# its interpreter may be ending, on a machine with other work. Ranks that were killed are known at once.
_CAUSE_SECONDS = 15.0
# How long ranks that lose a peer have to write a record before the job ends. They notice when the failed rank's process
# exits, which may take all of its last words; on a machine with other work, writing takes seconds too.
_RECORD_SECONDS = LAST_WORDS_SECONDS + 5.0
# A killed process ends within milliseconds, unless the kernel blocks it (a hung disk or driver).
_KILL_SECONDS = 5.0


class JobFailed(Exception):  # noqa: N818
    """The ranks have ended and are not started again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class JobStopped(Exception):  # noqa: N818
    """The ranks have ended because the launcher was stopped, and not all reported that they had saved."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(
            f"stopped by {number.name} before all ranks had saved: "
            "rerun the same command to resume from the last checkpoint"
        )
        self.number = number


class Agent(LocalElasticAgent):
    """Runs `program arguments…` on `num_ranks` local ranks until they have ended or JobFailed is raised."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_ranks: int,
        max_restarts: int,
        files: RankFiles,
        grace_seconds: float,
        imports: Sequence[str] = (),
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            rdzv_handler=OneMachine(),
            entrypoint=sys.executable,
            # -P: like our own command, without the working folder on the module path. $$ is a dollar: the agent
            # replaces ${local_rank} in arguments.
            args=("-P", "-m", "shardwise.training.launch.rank_process", *(word.replace("$", "$$") for word in command)),
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_SECONDS,
        )
        # torch's agent calls these two, which are overridden here.
        torch_private.need("start_workers", "monitor_workers")
        super().__init__(spec, RankEnvironments(files))
        self._command, self._imports = command, imports
        self._warm: WarmStart | None = None
        self._files = files
        self._grace_seconds = grace_seconds
        self._deadline = float("inf")
        self._num_starts = 0
        self._pids: dict[int, int] = {}
        self.stopped_by: signal.Signals | None = None
        # True under nohup.
        self._ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    @property
    def restarts(self) -> int:
        return self._num_starts - 1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._num_starts += 1
        clear_records(self._files.records)
        if not self.restarts:
            clear_restarts(self._files.records)
        if self._warm is None:
            threads = num_threads(worker_group.spec.local_world_size)
            self._warm = WarmStart(self._imports, num_threads=threads)
        with forking(self._warm, self._command):
            self._pids = super()._start_workers(worker_group)
        if not worker_group.spec.max_restarts:
            self.close()
        # These replace torch's own handlers, which interrupt the agent wherever it is.
        for number in (*STOP_SIGNALS, signal.SIGINT):
            ignored = number == signal.SIGHUP and self._ignores_hangup
            signal.signal(number, signal.SIG_IGN if ignored else self._stop)
        if self.stopped_by is not None:
            # The signal came between two starts.
            self._terminate_ranks()
        return self._pids

    def close(self) -> None:
        """End the warm process."""
        if self._warm is not None:
            self._warm.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: ask the ranks once to save and exit. A second ^C does not wait for them."""
        if self.stopped_by is None:
            self.stopped_by = signal.Signals(number)
            self._deadline = time.monotonic() + self._grace_seconds
            self._terminate_ranks()
        elif number == signal.SIGINT:
            self._deadline = time.monotonic()

    def _terminate_ranks(self) -> None:
        for pid in self._pids.values():
            # Not the process group: a rank that saves still needs its data-loader processes.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failure = self._first_failure()
        running = self._pids.keys() - self._exits().keys()
        late = bool(running) and time.monotonic() > self._deadline
        if failure is None and running and not late:
            return RunResult(state=WorkerState.HEALTHY)
        max_restarts = worker_group.spec.max_restarts
        restarts = failure is not None and failure.passing and self.stopped_by is None and self.restarts < max_restarts
        if failure is not None and not restarts:
            self._wait_for_records(failure)
        self._kill()
        # All have ended, and the agent collects them.
        result: RunResult = super()._monitor_workers(worker_group)
        if self.stopped_by is not None and (late or (failure is not None and (failure.killed or failure.echo))):
            raise JobStopped(self.stopped_by)
        if failure is None:
            return result
        if not restarts:
            raise JobFailed(failure)
        again = f"{failure}; restart {self.restarts + 1} of {max_restarts}"
        with suppress(OSError):
            # A full disk may be what ended the rank.
            note_restart(self._files.records, rank=failure.rank, text=again)
        lines = filter(None, (again, failure.notes))
        print(printable_lines("\n".join(lines)), file=sys.stderr)
        return RunResult(state=WorkerState.FAILED)

    def _first_failure(self) -> Failure | None:
        """Return the failure that ends this start, if any rank has failed, after giving that rank time to exit.

        If all known failures are echoes, the rank that caused them gets time to report or to exit.
        """
        reports: dict[int, Failure] = {}
        begun = time.monotonic()
        while True:
            # First, since a rank reports before it exits.
            exits = self._exits()
            for rank in self._pids.keys() - reports.keys():
                if (failure := reported(self._files.report(restarts=self.restarts, rank=rank))) is not None:
                    reports[rank] = failure
            codes = self._announced() | exits
            silent = {rank: code for rank, code in sorted(codes.items()) if rank not in reports}
            failures = [*reports.values(), *(self._ended(rank, code, reports) for rank, code in silent.items() if code)]
            if not failures:
                return None
            cause = first(failures)
            left = [rank for rank, code in silent.items() if code == 0]
            running = self._pids.keys() - codes.keys() - reports.keys()
            is_known, patience_seconds = cause.rank in exits, LAST_WORDS_SECONDS
            if cause.echo and self.stopped_by is None:
                is_known = cause.peer in left
                if cause.peer in running or (cause.peer is None and running and not left):
                    patience_seconds = _CAUSE_SECONDS
            if is_known or len(exits) == len(self._pids) or time.monotonic() - begun > patience_seconds:
                return self._named(cause, reports, left=left, running=running)
            time.sleep(_MONITOR_SECONDS)

    def _named(self, cause: Failure, reports: dict[int, Failure], *, left: Sequence[int], running: Set[int]) -> Failure:
        """Return the cause; for an echo, the failure of the rank that ended without a report, if there is one."""
        if not cause.echo or self.stopped_by is not None:
            return cause
        if left and (cause.peer is None or cause.peer in left):
            return self._ended(left[0] if cause.peer is None else cause.peer, 0, reports)
        if cause.peer in running:
            return replace(cause, what=f"{cause.what}; rank {cause.peer} is still running and has reported nothing")
        return cause

    def _ended(self, rank: int, code: int, reports: dict[int, Failure]) -> Failure:
        """Describe how a rank without a report has ended, and which rank noticed first."""
        echoes = [failure for failure in reports.values() if failure.echo]
        return ended(
            code,
            rank=rank,
            log=self._files.written(restarts=self.restarts, rank=rank),
            noticed_by=first(echoes).rank if echoes else None,
        )

    def _wait_for_records(self, failure: Failure) -> None:
        """Give ranks that lost a peer time to write their records, since the job is over.

        A rank that reported a failure has written its record before. If it has none, training had not begun, and no
        rank has one.
        """
        records = {rank: path_of(self._files.records, rank=rank) for rank in self._pids}
        if not failure.killed and not records[failure.rank].exists():
            return
        deadline = time.monotonic() + _RECORD_SECONDS
        while time.monotonic() < deadline:
            exits = self._exits()
            if all(rank in exits or path.exists() for rank, path in records.items()):
                return
            time.sleep(_MONITOR_SECONDS)

    def _announced(self) -> dict[int, int]:
        """Return the exit codes of ranks that are ending, where they are not 0."""
        paths = {rank: self._files.report(restarts=self.restarts, rank=rank) for rank in self._pids}
        return {rank: code for rank, path in paths.items() if (code := announced(path)) is not None}

    def _exits(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended, without reaping them: the agent does that."""
        codes = {}
        for rank, pid in self._pids.items():
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                codes[rank] = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return codes

    def _kill(self) -> None:
        """Kill all ranks and their child processes: each rank leads a process group."""
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while len(self._exits()) < len(self._pids) and time.monotonic() < deadline:
            time.sleep(0.005)
