"""One row per optimizer: the same network, trained for a few steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import given_optimizers as own
import torch
from scenario_rows.networks import WIDTH, Net, TiedNet
from scenario_rows.runners import Runner
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.train.config import OptimizerSection
from shardwise.train.optimizers import make_optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD, Nesterov momentum, weight decay": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "Lion (a user's own)": own.Lion,
    "Cautious Lion (the mean of a tensor)": own.CautiousLion,
    "LARS (norms of tensors), a subclass of SGD": partial(own.Lars, lr=0.01),
    "LAMB (norms of tensors)": own.Lamb,
    "8-bit Adam (a scale per 64 elements)": partial(own.BlockAdam, block=64),
}


def inputs(step: int, share: int, *, size: int = 4) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * step + share))


def by_optimizer(runner: Runner, name: str) -> dict[str, Tensor]:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(4):
        runner.step(optimizer, lambda share, step=step: called(inputs(step, share)).square().mean())
    return runner.weights(model)


def two_optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


def muon(runner: Runner) -> dict[str, Tensor]:
    """Matrices inside by Muon, all else by AdamW: two optimizers, as its authors use it."""
    model = Net()
    one, other = two_optimizers(model)
    called = runner.prepare(model, one, other)
    for step in range(4):
        both = Both(one, other)
        runner.step(both, lambda share, step=step: called(inputs(step, share)).square().mean())
    return runner.weights(model)


def muon_by_name(runner: Runner) -> dict[str, Tensor]:
    """One optimizer, as `shardwise train` makes it."""
    model = Net()
    optimizer = make_optimizer(model, OptimizerSection(name="muon", lr=0.01))
    called = runner.prepare(model, optimizer)
    for step in range(4):
        runner.step(optimizer, lambda share, step=step: called(inputs(step, share)).square().mean())
    return runner.weights(model)


def scaled_muon(runner: Runner) -> dict[str, Tensor]:
    """Scaled gradients, which overflow in the second step on the second rank."""
    model = Net()
    made = two_optimizers(model)
    called = runner.prepare(model, *made)
    scaler = runner.scaler()

    def loss(share: int, step: int) -> Tensor:
        found = called(inputs(step, share)).square().mean()
        return scaler.scale(found * float("inf") if (step, share) == (1, 1) else found)

    for step in range(4):
        runner.step(Scaled(scaler, *made), lambda share, step=step: loss(share, step))
    return runner.weights(model)


class Both:
    """Two optimizers that are stepped one after the other."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class Scaled(Both):
    """They are stepped by a scaler, unless a gradient has overflowed."""

    def __init__(self, scaler: torch.amp.GradScaler, *optimizers: Optimizer) -> None:
        super().__init__(*optimizers)
        self._scaler = scaler

    def step(self) -> None:
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()


def sparse(runner: Runner) -> dict[str, Tensor]:
    """Gradients of an embedding as sparse tensors, by SparseAdam; the rest by AdamW."""
    model = TiedNet(sparse=True, tied=False)
    rest = [p for name, p in model.named_parameters() if "embedding" not in name]
    one = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01)
    both = Both(one, torch.optim.AdamW(rest, lr=0.01))
    called = runner.prepare(model, *both._optimizers)
    tokens = torch.arange(8).view(2, 4)
    for step in range(3):
        runner.step(
            both,
            lambda share, step=step: nn.functional.cross_entropy(
                called(tokens + step + share).flatten(0, 1), tokens.flatten()
            ),
        )
    return runner.weights(model)


def lbfgs(runner: Runner) -> dict[str, Tensor]:
    """Its closure is called several times, and it looks at all parameters together."""
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    called = runner.prepare(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        shares = (0, 1) if runner.name == Runner.name else (runner.rank,)
        loss = sum((called(inputs(0, share)).square().mean() for share in shares), torch.zeros(())) / len(shares)
        loss.backward()
        return loss

    optimizer.step(closure)
    return runner.weights(model)


ROWS: dict[str, Callable[[Runner], dict[str, Tensor]]] = {
    **{name: partial(by_optimizer, name=name) for name in OPTIMIZERS},
    "Muon for matrices, AdamW for the rest": muon,
    "the same as one optimizer (`muon` of `shardwise train`)": muon_by_name,
    "Muon and a GradScaler, with an overflow on one rank": scaled_muon,
    "SparseAdam for a sparse embedding": sparse,
    "LBFGS, with a closure": lbfgs,
}
