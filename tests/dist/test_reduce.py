"""On a mesh with two axes, slices of gradients are summed over the second one while backward goes on."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from torch import Tensor
from training import Case, make_collectives, on_ranks

from shardwise.comm.collectives import BackendCollectives, Work
from shardwise.comm.groups import Group
from shardwise.comm.late import LateCollectives
from shardwise.engine.engine import engine_of
from shardwise.engine.prepare import prepare
from shardwise.mesh import Mesh
from shardwise.plan import Plan
from shardwise.tasks import cross_entropy

MESH = Mesh(replicate=2, shard=2)
GPT = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=3)
# The three blocks and the root.
NUM_BUCKETS = 4

Happening = tuple[str, str, int]
"""("issue" or "wait", the collective, its number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedWork:
    inner: Work
    happened: list[Happening]
    name: str
    number: int

    def wait(self) -> None:
        self.inner.wait()
        self.happened.append(("wait", self.name, self.number))


class Watched(LateCollectives):
    """Late collectives that note when each is issued, and when it is waited for."""

    def __init__(self, *, seed: int) -> None:
        super().__init__(BackendCollectives(), seed=seed)
        self.happened: list[Happening] = []

    def _issue(self, kind: str, buffer: Tensor, *, group: Group, **how: Any) -> Work:
        name = f"{kind} over {group.ranks}"
        self.happened.append(("issue", name, len(self.issued)))
        number = len(self.issued)
        work = super()._issue(kind, buffer, group=group, **how)
        return WatchedWork(inner=work, happened=self.happened, name=name, number=number)


def watched_backward(rank: int, plan: Plan) -> list[Happening]:
    """What happens in the second step's backward."""
    model, batch = GPT.make()
    optimizer = adamw(model.parameters())
    watched = Watched(seed=rank)
    prepare(model, optimizer, plan, collectives=watched)
    for step in range(2):
        loss = cross_entropy(model, batch(step, rank))
        watched.happened.clear()
        loss.backward()
        happened = list(watched.happened)
        optimizer.step()
        optimizer.zero_grad()
    for unit in engine_of(model).runner.units.values():
        unit.ensure()
    watched.assert_all_waited()
    groups = engine_of(model).groups
    watched.assert_same_order(groups.reduce)
    watched.assert_same_order(groups.replicate)
    return happened


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("reduces_in_flight", [1, 2])
def test_slices_cross_while_later_buckets_are_reduced(strategy: str, reduces_in_flight: int) -> None:
    plan = Plan(strategy=strategy, mesh=MESH, reduces_in_flight=reduces_in_flight)
    for rank, happened in enumerate(run_ranks(watched_backward, num_ranks=4, args=(plan,))):
        crossings = [one for one in happened if one[1] == f"all_reduce over {MESH.replicate_group(rank)}"]
        spans = {
            number: (happened.index(("issue", name, number)), happened.index(("wait", name, number)))
            for what, name, number in crossings
            if what == "issue"
        }
        assert len(spans) == NUM_BUCKETS
        scatter = ("issue", f"reduce_scatter over {MESH.shard_group(rank)}")
        overlapped = [any(one[:2] == scatter for one in happened[start:end]) for start, end in spans.values()]
        # The last buckets to be reduced are waited for when nothing is left to be issued.
        assert overlapped == [True] * (NUM_BUCKETS - reduces_in_flight) + [False] * reduces_in_flight
        # Of the memory of slices no more is under way than those of one bucket, and of the next as it is sent.
        order = [what for what, _, _ in crossings]
        assert max(order[:end].count("issue") - order[:end].count("wait") for end in range(len(order) + 1)) <= 2


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gradients_are_the_same_bits_however_late_slices_arrive(reduce_dtype: str) -> None:
    """Under every strategy that shards gradients, and in the dtype in which they are reduced."""
    runs = [
        run_ranks(
            on_ranks, num_ranks=4, args=(GPT, Plan(strategy=strategy, mesh=MESH, reduce_dtype=reduce_dtype), late)
        )
        for strategy, late in (("fsdp", False), ("fsdp", True), ("zero2", True))
    ]
    expected = runs[0][0].weights
    for result in (result for results in runs for result in results):
        for name, weight in expected.items():
            assert weight.isfinite().all()
            assert torch.equal(result.weights[name], weight), name


def fails_while_slices_cross(rank: int) -> bool:
    """Backward breaks in the first block, when the last one's slices are under way; then the step is done again."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    weights = []
    for breaks in (False, True):
        torch.manual_seed(1)
        model, batch = GPT.make()
        optimizer = adamw(model.parameters())
        late = make_collectives(late=True, rank=rank)
        prepare(model, optimizer, Plan(mesh=MESH), collectives=late)
        for step in range(3):
            if breaks and step == 1:
                block = model.blocks[0]
                handle = block.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
                with pytest.raises(ZeroDivisionError):
                    cross_entropy(model, batch(step, rank)).backward()
                handle.remove()
                assert any(
                    segment.work for bucket in engine_of(model).runner.queue.buckets for segment in bucket.segments
                )
            cross_entropy(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_backward_that_fails_while_slices_cross_leaves_nothing_behind() -> None:
    assert run_ranks(fails_while_slices_cross, num_ranks=4) == [True] * 4
