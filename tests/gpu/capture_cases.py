"""Steps that are run twice, captured and as ordinary ones, and must come to the same bits.

Ordinary steps use the same optimizer with capturable=True, and the same stream: `Plan(capture="off")` behind the
same call. Kernels are chosen that give the same bits each time.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise
from shardwise import Plan
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
    """What a run gave: losses, weights at the end, lines that were told, which steps were replayed."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    replayed: list[bool] = field(default_factory=list)

    def same_as(self, other: "Ran") -> bool:
        return self.losses == other.losses and all(torch.equal(self.weights[n], other.weights[n]) for n in self.weights)


def tokens(step: int, *, size: int = 4, seq: int = 64, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(SHAPE.vocab_size, (size, seq + 1), generator=generator).cuda()


def gpt_batch(step: int, *, size: int = 4, rank: int = 0) -> tuple[Tensor, Tensor]:
    found = tokens(step, size=size, rank=rank)
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
    clip: float | None = 1.0,
    make_optimizer: Callable[..., Any] = torch.optim.AdamW,
    **options: Any,
) -> Ran:
    torch.manual_seed(0)
    model = make_model().cuda()
    optimizer = make_optimizer(
        model.parameters(), **(options or {"lr": torch.tensor(1e-3, device="cuda"), "fused": True, "capturable": True})
    )
    shardwise.prepare(model, optimizer, plan)
    ran = Ran()

    def step(*batches: Any) -> Tensor:
        total = torch.zeros((), device="cuda")
        for number, each in enumerate(batches):
            with shardwise.accumulate(model, enabled=number + 1 < len(batches)):
                part = loss(model, each) / len(batches)
                part.backward()
            total += part.detach()
        if clip is not None:
            shardwise.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    captured = shardwise.capture(step, model, optimizer, functions=(loss,), tell=ran.lines.append)
    torch.manual_seed(7)
    with deterministic():
        for number in range(steps):
            between(model, optimizer, number)
            batches = [batch(number * passes + part) for part in range(passes)]
            ran.losses.append(captured(*batches).item())
            report = getattr(captured, "report", None)
            ran.replayed.append(bool(report and report.captured))
    ran.weights = {name: value.clone() for name, value in shardwise.full_state_dict(model)["model"].items()}
    return ran


class Masked(nn.Module):
    """As Hugging Face's models: attention without a mask where nothing is padded, with one where something is."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, 256)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        if mask.all():
            x = F.scaled_dot_product_attention(x, x, x)
        else:
            bias = torch.zeros(mask.shape, device=x.device, dtype=x.dtype).masked_fill(~mask, -1e4)
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=bias[:, None, :].expand(-1, x.shape[1], -1))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


def masked_batch(step: int, *, padded: Callable[[int], bool], rank: int = 0) -> dict[str, Tensor]:
    ids = tokens(step, seq=31, rank=rank)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if padded(step):
        mask[0, -7:] = False
    return {"ids": ids, "mask": mask, "labels": ids.roll(1, dims=1)}


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["mask"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
