"""Reads the environment variables that say which rank of which job this process is, and where the ranks meet.

    started by    its rank                  the ranks meet over
    our launcher  RANK, WORLD_SIZE …        a file, a new one for each start
    torchrun      RANK, WORLD_SIZE …        the agent's TCP store, at MASTER_ADDR:MASTER_PORT
    SLURM         SLURM_PROCID, …           a TCP store of rank 0 on the first node; on loopback if there is only one
    no launcher   0, in a job of one rank   memory

No torch here: our launcher's ranks read their number before they import it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.base.errors import InvalidJob

# The file over which the ranks of one start meet, set by our launcher.
STORE = "SHARDWISE_STORE"
# Turns CUDA graphs of units off, for debugging.
CAPTURE = "SHARDWISE_CAPTURE"
# The folder in which ranks of a failing job leave their records.
AUTOPSY = "SHARDWISE_AUTOPSY"
# The key of the snapshots in memory, set by our launcher for all starts of its ranks.
SNAPSHOTS = "SHARDWISE_SNAPSHOTS"
# A file system in memory for snapshots, other than /dev/shm.
MEMORY = "SHARDWISE_MEMORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The way this process was started. `num_nodes` is 0 if the launcher does not say."""

    launcher: Literal["", "torchrun", "slurm"] = ""
    rank: int = 0
    local_rank: int = 0
    num_ranks: int = 1
    num_nodes: int = 1
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The place where the ranks of a job meet: a file, else a TCP store, else (one rank) memory.

    serves      this process runs the TCP store
    local       all ranks are on this machine
    """

    file: str = ""
    address: str = ""
    port: int = 0
    serves: bool = False
    local: bool = True


def autopsy_folder() -> Path | None:
    """Return the folder that SHARDWISE_AUTOPSY names for records (record_writer.py), if it is set."""
    value = os.environ.get(AUTOPSY, "")
    return Path(value) if value else None


def memory_root() -> Path:
    """Return the file system in memory that holds snapshots: /dev/shm, or what SHARDWISE_MEMORY names."""
    return Path(os.environ.get(MEMORY, "") or "/dev/shm")


def capture_is_off() -> bool:
    """Return whether SHARDWISE_CAPTURE=off turns CUDA graphs of units off, whatever the plan says."""
    value = os.environ.get(CAPTURE, "")
    if value not in ("", "off"):
        raise InvalidJob(f"{CAPTURE} = {value!r}: must be off, or not be set")
    return value == "off"


def is_rank() -> bool:
    """Return whether this process was started as a rank of a job: by our launcher, torchrun or SLURM."""
    return _by_torchrun(os.environ) or _by_slurm(os.environ)


def by_our_launcher() -> bool:
    """Return whether our launcher started this rank, and so holds the lock of its run folder."""
    return STORE in os.environ and is_rank()


def why_alone(variables: Mapping[str, str]) -> str | None:
    """Return a line if `accelerate launch --cpu` was asked for several processes and started this one only.

    It then sets MASTER_ADDR, but no rank: on CPUs it starts several through MPI alone.
    """
    on_cpu = variables.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if not on_cpu or "MASTER_ADDR" not in variables or _by_torchrun(variables) or _by_slurm(variables):
        return None
    return (
        "accelerate launch --cpu was asked for several processes and started one, so this job has one rank: on CPUs, "
        "start them with torchrun --nproc-per-node N SCRIPT"
    )


def start_of(variables: Mapping[str, str]) -> Start:
    """Read how this process was started."""
    start = Start()
    if _by_torchrun(variables):
        start = _torchrun_start(variables)
    elif _by_slurm(variables):
        start = _slurm_start(variables)
    if not 0 <= start.rank < start.num_ranks:
        names = "RANK and WORLD_SIZE" if start.launcher == "torchrun" else "SLURM_PROCID and SLURM_NTASKS"
        raise InvalidJob(f"{names} make this process rank {start.rank} of {start.num_ranks}: ranks count from 0")
    return start


def rendezvous_of(start: Start, *, variables: Mapping[str, str]) -> Rendezvous:
    """Read where this process meets the other ranks."""
    if start.launcher == "torchrun":
        return _torchrun_rendezvous(start, variables=variables)
    if start.launcher == "slurm":
        return _slurm_rendezvous(start, variables=variables)
    return Rendezvous()


def _by_torchrun(variables: Mapping[str, str]) -> bool:
    # A batch script may set WORLD_SIZE for tasks that take their rank from SLURM. RANK without WORLD_SIZE or SLURM is a
    # mistake, which `start_of` reports.
    return "RANK" in variables and ("WORLD_SIZE" in variables or not _by_slurm(variables))


def _by_slurm(variables: Mapping[str, str]) -> bool:
    # A batch script that has not called srun is a single task, from which our own launcher starts ranks.
    return "SLURM_PROCID" in variables and variables.get("SLURM_NTASKS", "1") != "1"


def _torchrun_start(variables: Mapping[str, str]) -> Start:
    rank = _number("RANK", variables)
    return Start(
        launcher="torchrun",
        rank=rank,
        local_rank=_number("LOCAL_RANK", variables, default=rank),
        num_ranks=_number("WORLD_SIZE", variables),
        num_nodes=_number("GROUP_WORLD_SIZE", variables, default=0),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", variables, default=0),
    )


def _torchrun_rendezvous(start: Start, *, variables: Mapping[str, str]) -> Rendezvous:
    if STORE in variables:
        return Rendezvous(file=variables[STORE])
    return Rendezvous(
        address=_host(_text("MASTER_ADDR", variables)),
        port=_number("MASTER_PORT", variables),
        # Otherwise the agent serves the store.
        serves=start.rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        local=start.num_nodes == 1,
    )


def _slurm_start(variables: Mapping[str, str]) -> Start:
    return Start(
        launcher="slurm",
        rank=_number("SLURM_PROCID", variables),
        local_rank=_number("SLURM_LOCALID", variables, default=0),
        num_ranks=_number("SLURM_NTASKS", variables),
        num_nodes=_number("SLURM_NNODES", variables, default=0),
        restarts=_number("SLURM_RESTART_COUNT", variables, default=0),
    )


def _slurm_rendezvous(start: Start, *, variables: Mapping[str, str]) -> Rendezvous:
    if "SLURM_STEP_ID" not in variables:
        raise InvalidJob(
            f"this SLURM job has {start.num_ranks} tasks, but srun did not start this process: start it with srun, "
            "or unset SLURM_PROCID to run without SLURM"
        )
    # Jobs that share a node must not share a port. The kernel does not hand out ports below 32768.
    job, step = _number("SLURM_JOB_ID", variables, default=0), _number("SLURM_STEP_ID", variables)
    port = 15000 + (job + 131 * step) % 16000
    local = start.num_nodes == 1
    return Rendezvous(
        address=_host(variables.get("MASTER_ADDR", "")) or ("127.0.0.1" if local else _first_node(variables)),
        port=_number("MASTER_PORT", variables, default=port),
        serves=start.rank == 0,
        local=local,
    )


def _first_node(variables: Mapping[str, str]) -> str:
    """Return the host of rank 0: a01 for `a[01-04,07],b2`."""
    keys = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((variables[key] for key in keys if key in variables), "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        return _text("SLURM_LAUNCH_NODE_IPADDR", variables)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _host(address: str) -> str:
    """Remove the brackets that an IPv6 address may have, as in a URL."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def _text(name: str, variables: Mapping[str, str]) -> str:
    if name not in variables:
        raise InvalidJob(
            f"this process was started as a rank, but {name} is not set: start the ranks with torchrun or srun"
        )
    return variables[name]


def _number(name: str, variables: Mapping[str, str], *, default: int | None = None) -> int:
    if name not in variables and default is not None:
        return default
    text = _text(name, variables)
    try:
        return int(text)
    except ValueError:
        raise InvalidJob(f"this process was started as a rank, but {name} is {text!r}, not a whole number") from None
