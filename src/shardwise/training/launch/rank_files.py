"""The files and the environment of a job's ranks."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from shardwise.base.files.data_file import open_to_append
from shardwise.comm.job.job_environment import AUTOPSY, SNAPSHOTS, STORE
from shardwise.training.launch.failure import LOG
from shardwise.training.launch.rank_process import LAUNCHER


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of a job's ranks.

    `private` is the launcher's own folder and is removed with it; `logs` is kept, one file per rank for all starts.
    """

    private: Path
    logs: Path
    # Names the snapshots that ranks keep in memory (recovery/).
    snapshots: str = ""

    @property
    def records(self) -> Path:
        """The folder in which ranks of a failing job leave their records (comm/autopsy/own_record.py)."""
        return self.logs.parent

    def store(self, *, restarts: int) -> Path:
        return self.private / f"store-{restarts}"

    def report(self, *, restarts: int, rank: int) -> Path:
        return self.private / f"failure-{restarts}-{rank}.json"

    def log(self, *, rank: int) -> Path:
        return self.logs / f"rank-{rank}.txt"

    def head(self, *, restarts: int) -> str:
        """Return the line that begins a start in a log."""
        return f"--- launcher {os.getpid()}, restart {restarts} ---\n"

    def written(self, *, restarts: int, rank: int) -> str:
        """Return what a rank has written since that start."""
        return self.log(rank=rank).read_text(errors="replace").rpartition(self.head(restarts=restarts))[2]


class RankEnvironments(LogsSpecs):
    """Sets the environment of each rank. The agent calls `reify` before each start, to ask where logs go."""

    def __init__(self, files: RankFiles) -> None:
        super().__init__()
        self._files = files

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        restarts = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        threads = num_threads(len(envs))
        reports = {rank: str(self._files.report(restarts=restarts, rank=rank)) for rank in envs}
        for rank, environment in envs.items():
            log = self._files.log(rank=rank)
            with os.fdopen(open_to_append(log), "a") as file:
                file.write(self._files.head(restarts=restarts))
            environment |= {
                LAUNCHER: str(os.getpid()),
                LOG: str(log),
                AUTOPSY: str(self._files.records),
                SNAPSHOTS: self._files.snapshots,
                STORE: str(self._files.store(restarts=restarts)),
                "TORCHELASTIC_ERROR_FILE": reports[rank],
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": threads,
            }
        # The ranks redirect their output themselves.
        terminal = dict.fromkeys(envs, "")
        return LogsDest(stdouts=terminal, stderrs=terminal, error_files=reports)

    @property
    def root_log_dir(self) -> str:
        return str(self._files.logs)


def num_threads(num_ranks: int) -> str:
    """Return the threads of each rank: as the user's environment says, or the cores divided among the ranks."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
