"""One row per optimizer: the same network, trained for a few steps."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import given_optimizers as own
import torch
from scenario_rows.networks import WIDTH, Net, TiedNet
from scenario_rows.runners import Runner, Weights
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.training.config.config_sections import OptimizerSection
from shardwise.training.loop.optimizers import make_optimizer

BITSANDBYTES = "bitsandbytes"
# (what is called, step, share of the data) → loss
Loss = Callable[[Any, int, int], Tensor]


def _of_torch(name: str, **options: Any) -> Callable[[Any], Optimizer]:
    return partial(getattr(torch.optim, name), **{"lr": 0.01, **options})


def _of_bitsandbytes(name: str, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: getattr(__import__(BITSANDBYTES).optim, name)(params, **{"lr": 0.01, **options})


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": _of_torch("SGD", lr=0.05),
    "SGD, Nesterov momentum, weight decay": _of_torch("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": _of_torch("Adam"),
    "AdamW": _of_torch("AdamW"),
    "AdamW, amsgrad": _of_torch("AdamW", amsgrad=True),
    "AdamW, foreach": _of_torch("AdamW", foreach=True),
    "AdamW, fused": _of_torch("AdamW", fused=True),
    **{name: _of_torch(name) for name in ("RMSprop", "Adagrad")},
    "Adadelta": torch.optim.Adadelta,
    **{name: _of_torch(name) for name in ("Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor")},
    "Lion (a user's own)": own.Lion,
    "Cautious Lion (the mean of a tensor)": own.CautiousLion,
    "LARS (norms of tensors), a subclass of SGD": partial(own.Lars, lr=0.01),
    "LAMB (norms of tensors)": own.Lamb,
    "Shampoo, diagonal roots": own.Shampoo,
    "norms of matrices only": own.ByDimensions,
    "8-bit Adam (a scale per 64 elements)": partial(own.BlockAdam, block=64),
    "a step size from all gradients": own.Prodigy,
    "learning rates by place in a group": own.LayerDecay,
    "bitsandbytes `AdamW(optim_bits=8)`": _of_bitsandbytes("AdamW", optim_bits=8),
    "bitsandbytes `AdamW(optim_bits=8, min_8bit_size=0)`": _of_bitsandbytes("AdamW", optim_bits=8, min_8bit_size=0),
    "bitsandbytes `Lion8bit`": _of_bitsandbytes("Lion8bit", lr=1e-3),
}


def inputs(step: int, share: int, *, size: int = 4) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * step + share))


def square(called: Any, step: int, share: int) -> Tensor:
    loss: Tensor = called(inputs(step, share)).square().mean()
    return loss


class Training:
    """A model and its optimizers (AdamW by default) under an engine."""

    def __init__(self, runner: Runner, model: nn.Module, *optimizers: Optimizer, **plan: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = optimizers or (torch.optim.AdamW(trained, lr=0.01),)
        self.runner, self.model = runner, model
        self.optimizer: Any = optimizers[0] if len(optimizers) == 1 else Several(*optimizers)
        self.called: Any = runner.prepare(model, *optimizers, **plan)

    def steps(self, num_steps: int, loss: Loss = square, **options: Any) -> Iterator[int]:
        """Take steps, and yield the number of each after it was taken."""
        for step in self.runner.steps(num_steps):
            self.runner.step(self.optimizer, lambda share, step=step: loss(self.called, step, share), **options)
            yield step

    def train(self, num_steps: int, loss: Loss = square, **options: Any) -> Weights:
        for _ in self.steps(num_steps, loss, **options):
            pass
        return self.weights()

    def weights(self) -> Weights:
        return self.runner.weights(self.model)


def by_optimizer(runner: Runner, make: Callable[[Any], Optimizer]) -> Weights:
    model = Net()
    return Training(runner, model, make(model.parameters())).train(4)


def two_optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


def muon(runner: Runner) -> Weights:
    """Step the matrices of blocks by Muon and all else by AdamW: two optimizers, as Muon's authors use it."""
    model = Net()
    return Training(runner, model, *two_optimizers(model)).train(4)


def muon_by_name(runner: Runner) -> Weights:
    """Use one optimizer, as `shardwise train` makes it."""
    model = Net()
    return Training(runner, model, make_optimizer(model, OptimizerSection(name="muon", lr=0.01))).train(4)


def scaled_muon(runner: Runner) -> Weights:
    """Scale gradients, which overflow in the second step on the second rank."""
    model = Net()
    made = two_optimizers(model)
    training = Training(runner, model, *made)
    scaler = runner.scaler()
    training.optimizer = Scaled(scaler, *made)

    def loss(called: Any, step: int, share: int) -> Tensor:
        found = square(called, step, share)
        return scaler.scale(found * float("inf") if (step, share) == (1, 1) else found)

    return training.train(4, loss)


class Several:
    """Optimizers that are stepped one after the other."""

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


class Scaled(Several):
    """They are stepped by a scaler, unless a gradient has overflowed."""

    def __init__(self, scaler: torch.amp.GradScaler, *optimizers: Optimizer) -> None:
        super().__init__(*optimizers)
        self._scaler = scaler

    def step(self) -> None:
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()


def sparse(runner: Runner) -> Weights:
    """Step an embedding with sparse gradients by SparseAdam, and the rest by AdamW."""
    model = TiedNet(sparse=True, tied=False)
    rest = [p for name, p in model.named_parameters() if "embedding" not in name]
    tokens = torch.arange(8).view(2, 4)

    def loss(called: Any, step: int, share: int) -> Tensor:
        return nn.functional.cross_entropy(called(tokens + step + share).flatten(0, 1), tokens.flatten())

    made = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01), torch.optim.AdamW(rest, lr=0.01)
    return Training(runner, model, *made).train(3, loss)


def lbfgs(runner: Runner) -> Weights:
    """Its closure is called several times, and it looks at all parameters together."""
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    called = runner.prepare(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        shares = (0, 1) if runner.name == Runner.name else (runner.rank,)
        loss = sum((square(called, 0, share) for share in shares), torch.zeros(())) / len(shares)
        loss.backward()
        return loss

    optimizer.step(closure)
    return runner.weights(model)


ROWS: dict[str, Callable[[Runner], Weights]] = {
    **{name: partial(by_optimizer, make=make) for name, make in OPTIMIZERS.items()},
    "Muon for matrices, AdamW for the rest": muon,
    "the same as one optimizer (`muon` of `shardwise train`)": muon_by_name,
    "Muon and a GradScaler, with an overflow on one rank": scaled_muon,
    "SparseAdam for a sparse embedding": sparse,
    "LBFGS, with a closure": lbfgs,
}
