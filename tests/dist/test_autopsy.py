"""Real dumps of PyTorch's flight recorder, of a job that hangs: the rank that stopped is named."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d

from shardwise.autopsy.findings import STOPPED, verdict
from shardwise.autopsy.record_folder import read_records

HANGS = """
import os, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(8))
dist.barrier()
if rank == 0:
    dist.all_reduce(torch.ones(5), async_op=True)
    time.sleep(0.5)
with open(f"{folder}/nccl_trace_rank_{rank}", "wb") as file:
    file.write(_dump_fr_trace())
open(f"{folder}/done{rank}.txt", "w").close()
while not all(os.path.exists(f"{folder}/done{other}.txt") for other in range(2)):
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace"), reason="this torch has no flight recorder for Gloo")
def test_real_dumps_tell_which_rank_stopped(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "TORCH_FR_BUFFER_SIZE": "100",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": "",
    }
    ranks = [
        subprocess.Popen([sys.executable, script, tmp_path], env={**environment, "RANK": str(rank)}) for rank in (0, 1)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, *_ = verdict(read_records(tmp_path))
    assert (first.kind, first.ranks) == (STOPPED, (1,))
    assert "did not come to all_reduce 5 Float" in first.text
    assert "hangs.py:12" in first.text
