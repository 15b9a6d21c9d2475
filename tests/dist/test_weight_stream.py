"""`shardwise.weight_stream`: full weights, one unit at a time, while training goes on."""

import weakref
from typing import Any

import pytest
import torch
from cases import GPT, RESNET, adamw, make_images, make_tokens
from ranks import run_ranks
from torch import Tensor, nn
from training import line, make_collectives

import shardwise
from shardwise.comm.groups.agreement import RanksMissing
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

PLANS = [
    Plan(strategy="ddp"),
    Plan(strategy="zero1", precision="bf16"),
    Plan(strategy="fsdp"),
    Plan(strategy="fsdp", engine="torch"),
]


class FakeInference:
    """Takes weights as an inference engine does: copied into a model of its own, name by name."""

    def __init__(self, make: Any, shape: Any) -> None:
        self.model, _ = make(shape)
        self.tensors = dict(self.model.state_dict())
        self.loaded: list[str] = []

    def load_weights(self, name: str, tensor: Tensor) -> None:
        self.tensors[name].copy_(tensor)
        self.loaded.append(name)


def prepared(plan: Plan, *, rank: int, make: Any = make_tokens, shape: Any = GPT) -> Any:
    torch.manual_seed(3)
    model, batch = make(shape)
    collectives = make_collectives(late=True, rank=rank) if plan.engine == "shardwise" else None
    return *shardwise.prepare(model, adamw(model.parameters()), plan, collectives=collectives), batch


def streams(rank: int, plans: list[Plan], make: Any, shape: Any) -> None:
    """The weights of each step go out; rank 0's receiver computes with them, and training is none the worse."""
    for plan in plans:
        model, optimizer, batch = prepared(plan, rank=rank, make=make, shape=shape)
        other, others_optimizer, _ = prepared(plan, rank=rank, make=make, shape=shape)
        receiver = FakeInference(make, shape)
        for step in range(2):
            for one, its in ((model, optimizer), (other, others_optimizer)):
                cross_entropy(one, batch(step, rank)).backward()
                its.step()
                its.zero_grad()
            receiver.loaded = []
            for name, tensor in shardwise.weight_stream(model):
                if rank == 0:
                    receiver.load_weights(name, tensor)
            state = shardwise.full_state_dict(model)["model"]
            if rank == 0:
                assert sorted(receiver.loaded) == sorted(state), plan
                assert all(torch.equal(receiver.tensors[name], state[name]) for name in state), plan
            untouched = shardwise.full_state_dict(other)["model"]
            assert all(torch.equal(untouched[name], state[name]) for name in state), plan


def test_a_receiver_gets_every_weight_after_each_step_and_training_goes_on_as_without() -> None:
    run_ranks(streams, num_ranks=2, args=(PLANS, make_tokens, GPT))


def test_buffers_come_too() -> None:
    run_ranks(streams, num_ranks=2, args=([Plan(strategy="fsdp")], make_images, RESNET))


def in_order(rank: int) -> list[str]:
    model, optimizer, batch = prepared(Plan(), rank=rank)
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    buffers: list[weakref.ref[Any]] = []
    units: list[str] = []
    most = 0
    owner = {name: unit.name for unit in engine_of(model).core.units.values() for f in unit.flats for name in f.names}
    for name, tensor in shardwise.weight_stream(model, dtype=torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        if not buffers or buffers[-1]() is not tensor._base:
            buffers.append(weakref.ref(tensor._base))
        most = max(most, sum(held() is not None for held in buffers))
        units.append(owner.get(name, ""))
    assert most <= 2
    return list(dict.fromkeys(filter(None, units)))


def test_units_come_in_the_order_of_a_step_at_most_two_at_a_time_in_the_dtype_that_is_asked_for() -> None:
    for units in run_ranks(in_order, num_ranks=2):
        assert units == ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def refused(rank: int) -> list[str]:
    model, optimizer, batch = prepared(Plan(), rank=rank)
    cross_entropy(model, batch(0, rank)).backward()
    engine_of(model).core.followed.limit_seconds = 0.5
    said = []
    stream = shardwise.weight_stream(model)
    next(stream)
    said.append(line(optimizer.step))
    said.append(line(lambda: cross_entropy(model, batch(1, rank))))
    stream.close()
    optimizer.step()
    # Rank 1 has enough after the first.
    with pytest.raises(RanksMissing) if rank == 0 else pytest.MonkeyPatch.context() as caught:
        for _ in shardwise.weight_stream(model):
            if rank == 1:
                break
    said.append(str(caught.value) if rank == 0 else "")
    return said


def test_a_step_in_the_middle_is_refused_and_a_rank_that_stops_early_is_named() -> None:
    from ranks import shut_down

    said = run_ranks(refused, num_ranks=2)
    shut_down()
    assert said[0][0].startswith("optimizer.step() inside `for … in shardwise.weight_stream(model):`")
    assert said[0][1].startswith("a forward that trains inside")
    assert said[0][2].startswith("rank 1 did not come to shardwise.weight_stream at blocks.0")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def tied(rank: int) -> None:
    model = Tied()
    shardwise.prepare(model, None, Plan(units="none"))
    found = dict(shardwise.weight_stream(model))
    state = model.state_dict()
    assert list(found) == ["embed.weight", "head.weight"]
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_tied_weight_comes_by_each_of_its_names() -> None:
    run_ranks(tied, num_ranks=2)
