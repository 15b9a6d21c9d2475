"""What Python blocks of the documents go on from (`<!-- given: model, optimizer -->`), small enough for milliseconds."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.checkpoint import Checkpoints


class GivenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class GivenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivenBlock() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, x: Tensor) -> Tensor:
        return loss_of(self(x))


def loss_of(first: Any, batch: Tensor | None = None) -> Tensor:
    """Of outputs, or of a model and a batch: the documents have both."""
    outputs: Tensor = first if batch is None else first(batch)
    return outputs.square().mean()


def _trainer(model: nn.Module) -> SimpleNamespace:
    """What TRL's trainers hold of a model that vLLM serves. To train is to hand over all weights."""
    served: dict[str, Tensor] = {}

    def train() -> None:
        generation.sync_weights()
        assert dist.get_rank() or served.keys() == model.state_dict().keys()

    client = SimpleNamespace(update_named_param=served.__setitem__, reset_prefix_cache=lambda: None)
    generation = SimpleNamespace(vllm_client=client)
    return SimpleNamespace(model=model, vllm_generation=generation, train=train)


def _batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(3)]


def givens(names: Iterable[str], *, rank: int) -> dict[str, Any]:
    """Name → value. With `prepared`, model and optimizer have been through `shardwise.prepare`; with `backward`, the
    model has gradients; `loss value` is a loss that can go backward."""
    torch.manual_seed(0)
    model = GivenModel()
    optimizer = torch.optim.AdamW(model.parameters())
    make: dict[str, Callable[[], Any]] = {
        "shardwise": lambda: shardwise,
        "torch": lambda: torch,
        "nn": lambda: nn,
        "width": lambda: 8,
        "Plan": lambda: Plan,
        "plan": lambda: Plan(strategy="fsdp"),
        "model": lambda: model,
        "optimizer": lambda: optimizer,
        "loader": lambda: _batches(rank),
        "dataset": lambda: list(torch.randn(32, 8)),
        "sampler": lambda: shardwise.DistributedSampler(list(range(32))),
        "DataLoader": lambda: torch.utils.data.DataLoader,
        "micro_batches": lambda: _batches(rank),
        "batch": lambda: _batches(rank)[0],
        "loss": lambda: lambda module, batch: loss_of(module, batch),
        "loss_of": lambda: loss_of,
        "make_batch": lambda: lambda size: torch.randn(size, 8),
        "x": lambda: _batches(rank)[0],
        "y": lambda: torch.zeros(4, dtype=torch.long),
        "num_tokens": lambda: 4,
        "step": lambda: 1,
        "rank": lambda: rank,
        "evaluate": lambda: lambda module: loss_of(module, _batches(rank)[0]),
        "checkpoints": lambda: Checkpoints("run/checkpoints"),
        **{
            name: lambda: {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
            for name in ("average", "slow")
        },
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(GivenModel()),
        "inference": lambda: SimpleNamespace(load_weights=dict),
        "wandb": lambda: SimpleNamespace(log=lambda values, *, step: None),
        "trainer": lambda: _trainer(model),
        "cross_entropy": lambda: nn.functional.cross_entropy,
    }
    asked = {name.strip() for name in names}
    for phrase, precision in (("prepared", "fp32"), ("prepared in fp16", "fp16")):
        if phrase in asked:
            shardwise.prepare(model, optimizer, Plan(strategy="zero2", precision=precision))
            asked |= {"model", "optimizer"}
    if "backward" in asked:
        loss_of(model, _batches(rank)[0]).backward()
    found = {name: make[name]() for name in asked if name in make}
    if "loss value" in asked:
        found["loss"] = loss_of(model, _batches(rank)[0])
    unknown = asked - make.keys() - {"prepared", "prepared in fp16", "backward", "loss value"}
    assert not unknown, f"given: {', '.join(sorted(unknown))}: nobody makes it"
    return found
