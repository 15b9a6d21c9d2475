"""SLURM on this machine, in a folder: munge, a controller, and a node that is this machine."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_CONF = """
ClusterName=shardwise
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=20
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=here Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return all(shutil.which(command) for command in COMMANDS) and os.geteuid() == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A cluster of one node, which is up."""

    conf: Path

    def run(self, *command: str, folder: Path, **variables: str) -> str:
        """What a command of SLURM printed."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf), **variables}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED …"""
        shown = self.run("scontrol", "show", "job", job, "--oneliner", folder=self.conf.parent)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("JobState="))


@contextmanager
def slurm_here(folder: Path) -> Iterator[Slurm]:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, host=socket.gethostname(), controller=free_port(), node=free_port()))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # munged insists on folders that nobody else can write to.
    folder.chmod(0o711)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    socket_option = ["--socket", str(folder / "munge.socket"), "--key-file", str(key)]
    files = ["--pid-file", str(folder / "munged.pid"), "--seed-file", str(folder / "munged.seed")]
    commands = [
        ["munged", "--foreground", "--force", "--log-file", str(folder / "munged.log"), *socket_option, *files],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", socket.gethostname()],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.txt", "wb") as output:
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            time.sleep(0.5)
        slurm = Slurm(conf=conf)
        _wait_until_up(slurm, folder)
        yield slurm
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_up(slurm: Slurm, folder: Path) -> None:
    shown = ""
    for _ in range(60):
        time.sleep(0.5)
        try:
            shown = slurm.run("sinfo", "--noheader", "--format", "%T", folder=folder)
        except AssertionError as error:
            shown = str(error)
        if shown == "idle":
            return
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.txt"))
    raise AssertionError(f"the node is not up: {shown}\n{logs}")
