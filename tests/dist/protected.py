"""A training loop of a user's own that `shardwise.protect` protects, for ranks of the pool and as a program.

python protected.py STRATEGY FOLDER MEMORY      as a rank of a launcher; kills itself as KILL says, once
"""

import os
import signal
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.plan import Plan
from shardwise.state.recovery.protect import Protection

NUM_STEPS, EVERY = 9, 2


class Noisy(nn.Module):
    """Blocks with dropout and batch statistics: random numbers and buffers matter. Sizes that do not divide."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.GELU()) for _ in range(3)
        )
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x * self.frozen).square().mean()


class Protected:
    """One training: the model, its optimizer, an average, a schedule, and what protects them."""

    def __init__(
        self,
        plan: Plan,
        *,
        folder: Path,
        ema: bool = True,
        width: int = 13,
        disk: bool = False,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.device = torch.device(device)
        self.model: Any = Noisy(width)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.model, self.optimizer = shardwise.prepare(self.model, optimizer, plan, device=device)
        self.width, self.accumulate = width, plan.accumulate
        self.ema = shardwise.EMA(self.model, decay=0.9) if ema and plan.engine == "shardwise" else None
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.scaler = shardwise.GradScaler(
            self.device.type, enabled=plan.precision == "fp16", init_scale=8.0, growth_interval=3
        )
        self.rank = torch.distributed.get_rank()
        torch.manual_seed(self.rank)
        self.checkpoints = Checkpoints(folder / "checkpoints") if disk else None
        self.told: list[str] = []
        self.run: Protection = shardwise.protect(
            self.model,
            self.optimizer,
            {"schedule": self.schedule, "scaler": self.scaler},
            folder=folder,
            checkpoints=self.checkpoints,
            ema=self.ema,
            every=EVERY,
            tell=self.told.append,
        )

    def step(self, number: int) -> float:
        for index in range(self.accumulate):
            with shardwise.accumulate(self.model, enabled=index + 1 < self.accumulate):
                loss = self.model(torch.randn(6, self.width, device=self.device))
                self.scaler.scale(loss / self.accumulate).backward()
        kill("backward", number)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        self.scaler.step(self.optimizer)
        kill("update", number)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.ema is not None:
            self.ema.update()
        value: float = loss.item()
        # Such a step is shorter than a snapshot takes; which ones are taken must not depend on that.
        self.run._recovery._snapshots.join()
        self.run.completed(number, {"loss": value})
        kill("snapshot", number)
        return value

    def state(self) -> dict[str, Any]:
        """All that a training consists of, in full."""
        full = shardwise.full_state_dict(self.model, self.optimizer)
        if self.ema is not None:
            with self.ema.applied():
                full["ema"] = shardwise.full_state_dict(self.model)["model"]
        return deepcopy(full | {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()})


def kill(moment: str, step: int) -> None:
    """Kill this process if KILL says `RANK MOMENT STEP` and it was started for the first time."""
    here = [os.environ.get("RANK"), moment, str(step)]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ.get("KILL", "").split() == here:
        Path(sys.argv[2], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(device: str = "cpu") -> None:
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    training = Protected(Plan(strategy=strategy), folder=folder, device=device)
    print(f"begins after step {training.run.step}, values {training.run.values}", flush=True)
    losses = []
    for number in range(training.run.step + 1, NUM_STEPS + 1):
        (folder / f"began-{training.rank}-{number}-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}").touch()
        losses.append(training.step(number))
    state = training.state()
    if training.rank == 0:
        torch.save({"first": training.run.step - len(losses), "losses": losses, "state": state}, folder / "end.pt")
    training.run.close()


if __name__ == "__main__":
    main()
