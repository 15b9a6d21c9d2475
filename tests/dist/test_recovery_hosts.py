"""A whole node is lost under torchrun: two hosts that are network namespaces, each with a folder of its own in memory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hosts import Host
from test_recovery import equal

from shardwise.comm.job.job_environment import MEMORY

PROGRAM = Path(__file__).with_name("protected.py")
CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/test-hosts-{os.getpid()}")
    for node in "abc":
        (path / node).mkdir(parents=True)
    yield path
    shutil.rmtree(path)


def start(host: Host, *, at: Host, memory: Path, folder: Path, num_nodes: str, slow: bool) -> subprocess.Popen[str]:
    """torchrun with two ranks on a host, all meeting `at` one of them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=2"]
    torchrun += ["--rdzv-id=7", "--rdzv-backend=c10d", f"--rdzv-endpoint={at.address}:29400", "--max-restarts=3"]
    torchrun += [f"--rdzv-conf={CONF}"]
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    environment |= {"OMP_NUM_THREADS": "1", MEMORY: str(memory), "STEP_SECONDS": "0.7" if slow else "0"}
    # Otherwise agents that live on do not tell a new one where the ranks meet: it would wait for that without end.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / f"{host.name}-{memory.name}.txt").open("a") as output:
        return subprocess.Popen(
            host.command(*torchrun, PROGRAM, "fsdp", folder),
            env=environment,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


def finished(process: subprocess.Popen[str], folder: Path) -> bool:
    code = process.wait(timeout=100)
    assert code == 0, "\n".join(path.read_text()[-3000:] for path in folder.glob("*.txt"))
    return True


@pytest.mark.timeout(300)
@pytest.mark.whole
@pytest.mark.parametrize("after", ["a new node joins", "started again", "fewer ranks"])
def test_after_the_loss_of_a_node_training_continues_from_the_copies(
    hosts: tuple[Host, Host], memory: Path, tmp_path: Path, after: str
) -> None:
    one, other = hosts
    run, alone = tmp_path / "run", tmp_path / "alone"
    num_nodes = "1:2" if after == "fewer ranks" else "2"
    for folder in (run, alone):
        folder.mkdir()
    first = start(one, at=one, memory=memory / "a", folder=run, num_nodes=num_nodes, slow=True)
    second = start(other, at=one, memory=memory / "b", folder=run, num_nodes=num_nodes, slow=True)
    deadline = time.monotonic() + 90
    while not list((memory / "b").rglob("*.00000005.*.own.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The node is gone, with all of its memory.
    for child in processes_of(memory / "b"):
        os.kill(child, signal.SIGKILL)
    second.wait()
    shutil.rmtree(memory / "b")
    lost = time.time()
    if after == "started again":
        for child in processes_of(memory / "a"):
            os.kill(child, signal.SIGKILL)
        first.wait()
        first = start(one, at=one, memory=memory / "a", folder=run, num_nodes=num_nodes, slow=False)
    if after != "fewer ranks":
        third = start(other, at=one, memory=memory / "c", folder=run, num_nodes=num_nodes, slow=False)
        assert finished(third, run)
    assert finished(first, run)
    # Of the last start of rank 0: those that are left may begin a step before they notice.
    next_step = min(path.stat().st_mtime for path in run.glob(f"began-0-*-{restarts(run)}"))
    print(f"{after}: the next step began {next_step - lost:.1f} s after the loss")
    assert next_step - lost < 60
    end = torch.load(run / "end.pt")
    assert end["first"] >= 3
    if after != "fewer ranks":
        (memory / "b").mkdir()
        both = [start(host, at=one, memory=memory / node, folder=alone, num_nodes="2", slow=False)
                for host, node in ((one, "a"), (other, "b"))]  # fmt: skip
        assert all(finished(process, alone) for process in both)
        assert equal(end["state"], torch.load(alone / "end.pt")["state"])


def restarts(run: Path) -> str:
    """How often the agent of the node with rank 0 had started its ranks when the last step began."""
    last = max(run.glob("began-0-*"), key=lambda path: path.stat().st_mtime)
    return last.name.rpartition("-")[2]


def processes_of(memory: Path) -> list[int]:
    """Every process of a node, by the variable that names its memory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MEMORY}={memory}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
