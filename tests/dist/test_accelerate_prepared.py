"""A prepared model that is handed to Accelerate, in real processes: one line on every rank, never DDP on top."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reliability.said import say

pytest.importorskip("accelerate")

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from torch import nn
from shardwise import Plan, prepare

lines = {}
for strategy in ("ddp", "fsdp"):
    for places in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = Accelerator(cpu=True, device_placement=places)
        assert accelerator.num_processes == 2
        model, optimizer = prepare(model, optimizer, Plan(strategy=strategy))
        try:
            accelerator.prepare(model, optimizer)
        except Exception as error:
            lines[f"{strategy} {places}"] = [type(error).__name__, str(error)]
Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(lines))
"""


@pytest.mark.ledger("accelerate-device-placement", outcome="refused", under=("ddp", "fsdp"))
@pytest.mark.timeout(120)
def test_accelerate_does_not_wrap_a_prepared_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.Popen(
        [*torchrun, str(tmp_path / "script.py"), str(tmp_path)],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stderr = process.communicate(timeout=110)[1]
    except subprocess.TimeoutExpired:
        # With the launcher its ranks, which would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, stderr
    for rank in (0, 1):
        lines = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(lines) == ["ddp False", "ddp True", "fsdp False", "fsdp True"]
        for asked, (kind, line) in lines.items():
            assert kind == "InvalidModel"
            assert len(say(line).splitlines()) == 1
            wraps, moves = "do not hand it to accelerator.prepare", "cannot be moved or cast"
            assert (moves if asked.endswith("True") else wraps) in line
