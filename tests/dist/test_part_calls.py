"""A method that calls parts of a model, backward and updates by itself: a GAN's step, as frameworks run it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from whole import in_turn

import shardwise
from shardwise.engine.prepared.forward_method import run_with_backward
from shardwise.plan import Plan

NUM_STEPS = 3
judge = nn.functional.binary_cross_entropy_with_logits


def make_net(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(one, other) for one, other in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


class Gan(nn.Module):
    """Two networks, and a parameter of its own. `backward`: of the losses that all ranks have at this point."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.generator, self.discriminator = make_net(4, 7, 5, 3), make_net(3, 7, 5, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()
        self.optimizers = [
            torch.optim.AdamW([*self.generator.parameters(), self.scale], lr=1e-2),
            torch.optim.AdamW(self.discriminator.parameters(), lr=1e-2),
        ]

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z) * self.scale

    def real(self, x: Tensor, fake: Tensor) -> Tensor:
        return judge(self.discriminator(x), torch.ones(len(x), 1, dtype=x.dtype))

    def false(self, x: Tensor, fake: Tensor) -> Tensor:
        return judge(self.discriminator(fake.detach()), torch.zeros(len(x), 1, dtype=x.dtype))

    def fooled(self, x: Tensor, fake: Tensor) -> Tensor:
        return judge(self.discriminator(fake), torch.ones(len(x), 1, dtype=x.dtype))

    def step(self, batches: list[Any]) -> None:
        def backward(losses: list[Callable[..., Tensor]], fakes: list[Tensor]) -> None:
            for (_, x), fake in zip(batches, fakes, strict=True):
                (sum(loss(x, fake) for loss in losses) / len(batches)).backward()

        of_generator, of_discriminator = self.optimizers
        nothing = [x for _, x in batches]
        if self.order == "in turn":
            backward([self.fooled], [self(z) for z, _ in batches])
            of_generator.step()
            self.zero_grad()
            with torch.no_grad():
                self.generator(batches[0][0])
            backward([self.real, self.false], [self(z) for z, _ in batches])
            of_discriminator.step()
        else:
            # The fakes are made once, and outlive two backwards and an update of the other network.
            backward([self.real], nothing)
            fakes = [self.generator(z) * self.scale for z, _ in batches]
            backward([self.false], fakes)
            of_discriminator.step()
            of_generator.zero_grad()
            backward([self.fooled], fakes)
            of_generator.step()
        self.zero_grad()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return tuple(torch.randn(4, width, generator=generator, dtype=torch.float64) for width in (4, 3))


def differs(rank: int, strategy: str, order: str, units: str) -> float:
    expected, model = Gan(order), Gan(order)
    shardwise.prepare(model, model.optimizers, Plan(strategy=strategy, units=units, precision="native"))
    for step in range(NUM_STEPS):
        expected.step([batch(step, other) for other in range(2)])
        run_with_backward(model, "step", [batch(step, rank)])
    found = model.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in expected.state_dict().items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("order", "strategy"), in_turn(["in turn", "once"], "zero2", "fsdp", every=("ddp", "fsdp")))
@pytest.mark.parametrize("units", ["leaf", "none"])
def test_two_networks_that_are_trained_in_one_method_train_as_in_one_process(
    strategy: str, order: str, units: str
) -> None:
    assert max(run_ranks(differs, num_ranks=2, args=(strategy, order, units))) < 1e-12
