"""Jobs that hang or crash, and what their ranks leave behind: the rank that stopped is named, and its operation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d
from ports import free_port
from test_watch import started

from shardwise.comm.autopsy.findings import DISAGREE, FAILED, NO_RECORD, STOPPED, Finding, verdict
from shardwise.comm.autopsy.record_folder import read_records

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
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
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


def left_by(fault: str, folder: Path, *, strategy: str = "fsdp") -> Finding:
    """The first finding on a job of two ranks, of which rank 1 went wrong before its fourth step."""
    records = folder / "records"
    records.mkdir()
    started(fault, strategy, folder, SHARDWISE_AUTOPSY=str(records))
    return verdict(read_records(records))[0]


def test_a_rank_that_was_stopped_is_named_with_what_the_other_waits_in(tmp_path: Path) -> None:
    finding = left_by("stopped", tmp_path)
    assert (finding.kind, finding.ranks) == (NO_RECORD, (1,))
    assert (
        "rank 1 left no record: killed, stopped, or its machine is gone; rank 1 was last heard at step " in finding.text
    )
    assert "rank 0 waited in gather blocks.0 of 320 elements (number " in finding.text


def test_a_rank_whose_own_code_holds_it_up_is_named_with_what_it_should_do_next(tmp_path: Path) -> None:
    finding = left_by("data", tmp_path, strategy="zero2")
    assert (finding.kind, finding.ranks, finding.group) == (STOPPED, (1,), "reduce")
    assert "rank 1 stopped after reduce blocks.0 of 320 elements (number 16) and did not come to reduce blocks.3" in (
        finding.text
    )
    assert (
        "rank 0 waits for it; rank 1 was at step 4, between steps, after gather blocks.3; next in its s" in finding.text
    )
    assert finding.text.endswith("; next in its step program: forward (root)")


def test_a_skipped_collective_is_named_with_what_the_step_program_has_there(tmp_path: Path) -> None:
    finding = left_by("skip reduce", tmp_path)
    assert (finding.kind, finding.group) == (DISAGREE, "reduce")
    assert "rank 0 issued reduce blocks.2 of 320 elements" in finding.text
    assert "rank 1 issued reduce blocks.1 of 320 elements" in finding.text
    assert finding.text.endswith("; the step program has reduce blocks.2 there")


def test_a_rank_that_was_killed_left_no_record_and_the_other_says_where_it_was(tmp_path: Path) -> None:
    finding = left_by("killed", tmp_path)
    assert (finding.kind, finding.ranks) == (NO_RECORD, (1,))
    assert "rank 0 waited in gather blocks.0 of 320 elements" in finding.text


RAISES = """
import torch, shardwise

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shardwise.prepare(model, optimizer, shardwise.Plan())
for step in range(2):
    model(torch.ones(1, 4)).sum().backward()
    if step == 1:
        raise ValueError("my own mistake")
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_own_loop_that_raises_leaves_a_record_where_the_environment_says(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    records = tmp_path / "records"
    records.mkdir()
    environment = {**os.environ, "SHARDWISE_AUTOPSY": str(records)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: my own mistake" in done.stderr
    first, *_ = verdict(read_records(records))
    assert (first.kind, first.ranks) == (FAILED, (0,))
    assert first.text.startswith("rank 0 failed (ValueError: my own mistake): at step 2, backward")
