"""Starts ranks from a process that has imported everything (warm_process.py), instead of by new interpreters.

`WarmStart` is the launcher's end of it; `WarmRanks` are processes that torch's agent watches like those that it starts.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shardwise.training.launch.warm_process import READY

_PR_SET_CHILD_SUBREAPER = 36
# A fork takes milliseconds, but not where the machine swaps.
_ANSWER_SECONDS = 60.0
# What a rank imports in any case: the engine, and what torch imports at the first optimizer.
_MODULES = ("torch._dynamo", "shardwise.engines", "shardwise.state.recovery.protect")


class WarmStart:
    """Keeps the warm process; `imports` are modules that the ranks' program imports besides the usual ones."""

    def __init__(self, imports: Sequence[str], *, num_threads: str) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        modules = (*_MODULES, *imports)
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shardwise.training.launch.warm_process", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                # OpenMP reads it when torch is imported.
                env=os.environ | {"OMP_NUM_THREADS": num_threads},
            )
        self._is_ready = False

    def is_ready(self) -> bool:
        """Wait until it has imported everything; return whether it lives."""
        if not self._is_ready:
            # It answers, or ends and closes its end.
            self._link.settimeout(None)
            self._is_ready = self._link.recv(len(READY)) == READY
        return self._is_ready and self._process.poll() is None

    def fork(self, words: Sequence[str], *, env: Mapping[str, str]) -> int:
        """Start `python -m shardwise.training.launch.rank_process words…`; return its process id."""
        self._link.settimeout(_ANSWER_SECONDS)
        self._link.sendall(json.dumps({"words": list(words), "env": {**os.environ, **env}}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._link.recv(64)
            if not part:
                raise ConnectionError("the warm process has ended")
            answer += part
        return int(answer)

    def close(self) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def forking(warm: WarmStart, words: Sequence[str]) -> Iterator[None]:
    """Make torch's agent fork ranks in this block, which run `words`; if the warm process has ended, start new ones."""
    if not warm.is_ready():
        yield
        return

    def start(*, name: str, entrypoint: str, args: Any, envs: Any, logs_specs: Any, **_: Any) -> WarmRanks:
        ranks = WarmRanks(name, entrypoint, args, envs, logs_specs)
        ranks.fork = lambda env: warm.fork(words, env=env)
        ranks.start()
        return ranks

    # The agent has no other way to start processes.
    agent: Any = local_elastic_agent
    usual, agent.start_processes = agent.start_processes, start
    try:
        yield
    finally:
        agent.start_processes = usual


class WarmRanks(SubprocessContext):
    """Ranks that were forked, for torch's agent."""

    fork: Callable[[Mapping[str, str]], int]

    def _start(self) -> None:
        handles: Any = {rank: _Forked(self.fork(env)) for rank, env in sorted(self.envs.items())}
        self.subprocess_handlers = handles


class _Forked:
    """One rank: a handle as torch's agent has one for each process, and its `proc`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.proc = self
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.005)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, death_sig or signal.SIGTERM)
