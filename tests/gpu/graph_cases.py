"""Trainings in an ordinary loop, which units as CUDA graphs must bring to the same bits as `Plan(capture="off")`.

Kernels are chosen that give the same bits each time.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise
from shardwise import Plan
from shardwise.engines import require_engine
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy

# cuBLAS adds up in another order with every workspace; read when CUDA is used first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
SHAPE = GPTShape(num_layers=2, width=128, num_heads=4, vocab_size=256, max_seq=64)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Fused attention adds up gradients in another order each time.
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Ran:
    """What a run gave: losses, weights at the end, and how many calls of units were replays."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    num_replayed: int = 0

    def same_as(self, other: "Ran") -> bool:
        return self.losses == other.losses and all(torch.equal(self.weights[n], other.weights[n]) for n in self.weights)


def gpt_batch(step: int, *, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(SHAPE.vocab_size, (size, 65), generator=generator).cuda()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def run(
    plan: Plan,
    *,
    make_model: Callable[[], nn.Module] = lambda: build_model(SHAPE, device="cpu"),
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    batch: Callable[[int], Any] = gpt_batch,
    steps: int = 30,
    passes: int = 1,
    between: Callable[[nn.Module, Any, int], None] = lambda model, optimizer, step: None,
) -> Ran:
    torch.manual_seed(0)
    model = make_model().cuda()
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    shardwise.prepare(model, optimizer, plan)
    ran = Ran()
    torch.manual_seed(7)
    with deterministic():
        for number in range(steps):
            between(model, optimizer, number)
            total = torch.zeros((), device="cuda")
            for part in range(passes):
                with shardwise.accumulate(model, enabled=part + 1 < passes):
                    one = loss(model, batch(number * passes + part)) / passes
                    one.backward()
                total += one.detach()
            shardwise.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ran.losses.append(total.item())
    ran.weights = {name: value.clone() for name, value in shardwise.full_state_dict(model)["model"].items()}
    _, ran.num_replayed = require_engine(model).replayed_calls()
    return ran
