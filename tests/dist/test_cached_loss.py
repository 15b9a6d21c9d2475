"""A loss that caches gradients of embeddings, as sentence-transformers' cached losses do, and one with parameters.

Embeddings are computed without gradients; the loss is taken back to them; then a hook of the caller's backward computes
each part again with gradients, and runs a backward of it inside.
"""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole import whole

import shardwise
from shardwise.doors.integrations.loss_parameters import announce_loss, hold_loss_parameters, without_loss_parameters
from shardwise.plan import Plan

NUM_STEPS = 3


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.Linear(9, 9))
    model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.1), inner, nn.Linear(9, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def cached(model: nn.Module, batch: Tensor) -> Tensor:
    parts, states, found = batch.split(3), [], []
    for part in parts:
        states.append(torch.get_rng_state())
        with torch.no_grad():
            found.append(model(part).detach().requires_grad_())
    one, other = torch.cat(found).chunk(2)
    loss = nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))
    loss.backward()
    loss = loss.detach().requires_grad_()

    def replay(grad: Tensor) -> None:
        for part, state, embedded in zip(parts, states, found, strict=True):
            with torch.enable_grad(), torch.random.fork_rng():
                torch.set_rng_state(state)
                again = (model(part) * embedded.grad).sum() * grad
            again.backward()

    loss.register_hook(replay)
    return loss


def reentrant(model: nn.Module, batch: Tensor) -> Tensor:
    return checkpoint(model, batch.requires_grad_(), use_reentrant=True).square().mean()


def trained(ranks: tuple[int, ...], model: Any, optimizer: Any, *, loss: str) -> dict[str, Tensor]:
    for step in range(NUM_STEPS):
        for rank in ranks:
            torch.manual_seed(10 * step + rank)
            batch = torch.randn(12, 5, dtype=torch.float64)
            (globals()[loss](model, batch) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differs(rank: int, strategy: str, loss: str, recompute: str) -> float:
    expected = trained((0, 1), *make(), loss=loss)
    model, optimizer = make()
    plan = Plan(strategy=strategy, units="leaf", precision="native", recompute=recompute)
    shardwise.prepare(model, optimizer, plan)
    found = trained((rank,), model, optimizer, loss=loss)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
@pytest.mark.parametrize(("loss", "recompute"), [("cached", "none"), ("cached", "full"), ("reentrant", "none")])
def test_a_backward_that_runs_the_whole_model_again_in_a_hook_trains_as_one_process(
    strategy: str, loss: str, recompute: str
) -> None:
    assert max(run_ranks(differs, num_ranks=2, args=(strategy, loss, recompute))) < 1e-12


class Judged(nn.Module):
    """A loss with a classifier of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = model
        self.classifier = nn.Linear(8, 3).double()

    def forward(self, batch: Tensor) -> Tensor:
        one, other = (self.model(part) for part in batch.chunk(2))
        return nn.functional.cross_entropy(self.classifier(torch.cat([one, other], 1)), torch.arange(len(one)) % 3)


def judged(ranks: tuple[int, ...], loss: Judged, optimizer: Any, *, passes: int) -> None:
    for step in range(NUM_STEPS):
        for number in range(passes):
            for rank in ranks:
                torch.manual_seed(100 * step + 10 * number + rank)
                found = loss(torch.randn(12, 5, dtype=torch.float64)) / len(ranks)
                announce_loss(loss.model, found)
                found.backward()
        optimizer.step()
        optimizer.zero_grad()


def differs_with_parameters(rank: int, strategy: str, passes: int) -> float:
    alone, ours = Judged(make()[0]), Judged(make()[0])
    names = list(ours.model.state_dict())
    hold_loss_parameters(ours.model, ours)
    optimizers = [torch.optim.AdamW(loss.parameters(), lr=1e-2) for loss in (alone, ours)]
    assert len(without_loss_parameters(ours.model)) == len(names)
    shardwise.prepare(ours.model, optimizers[1], Plan(strategy=strategy, units="class:Sequential", precision="native"))
    judged((0, 1), alone, optimizers[0], passes=passes)
    judged((rank,), ours, optimizers[1], passes=passes)
    assert list(ours.model.state_dict()) == names
    found = ours.model.state_dict()
    pairs = [(found[name], value) for name, value in alone.model.state_dict().items()]
    with shardwise.whole(ours.model):
        pairs.append((ours.classifier.weight.detach().clone(), alone.classifier.weight.detach()))
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_of_a_loss_train_with_the_model_as_in_one_process(strategy: str, passes: int) -> None:
    assert max(run_ranks(differs_with_parameters, num_ranks=2, args=(strategy, passes))) < 1e-12
