"""A prepared model that is handed to Accelerate, in real processes: its loop trains as with Accelerate's own DDP."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shardwise
from shardwise import Plan

def train(strategy, *, accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if strategy != "stock":
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    inputs = torch.arange(64.0).view(16, 4) / 64
    loader = DataLoader(TensorDataset(inputs, inputs[:, :2] ** 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return {k.removeprefix("module."): v.tolist() for k, v in model.state_dict().items()}

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == 2
states = {s: train(s, accelerator=accelerator) for s in ("stock", "ddp", "zero2", "fsdp")}
Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(states))
"""


@pytest.mark.ledger("accelerate-loop", outcome="right", under=("ddp", "zero2", "fsdp"))
@pytest.mark.timeout(120)
def test_an_accelerator_loop_trains_a_prepared_model_bit_for_bit_as_its_own_ddp(tmp_path: Path) -> None:
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
        states = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(states) == ["stock", "ddp", "zero2", "fsdp"]
        assert all(state == states["stock"] for state in states.values())
