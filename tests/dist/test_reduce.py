"""On a mesh with two axes, slices of gradients are summed over the second one while backward goes on."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from cases import MODELS, Batch, adamw
from late import LateCollectives
from ranks import run_ranks
from torch import Tensor, nn

from shardwise.comm.groups.collectives import BackendCollectives, Collectives, Work
from shardwise.comm.groups.groups import Group
from shardwise.engine.engine import engine_of
from shardwise.engines import prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

MESH = Mesh(replicate=2, shard=2)
# Of the model "gpt": the three blocks and the root.
NUM_BUCKETS = 4

Happening = tuple[str, str, tuple[int, ...], int]
"""("issue" or "wait", a collective, its ranks, its number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedWork:
    inner: Work
    happened: list[Happening]
    what: tuple[str, tuple[int, ...], int]

    def wait(self) -> None:
        self.inner.wait()
        self.happened.append(("wait", *self.what))


class Watched(LateCollectives):
    """Late collectives that note when a reduction is issued, and when it is waited for."""

    def __init__(self, *, seed: int) -> None:
        super().__init__(BackendCollectives(), seed=seed)
        self.happened: list[Happening] = []

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return self._watch(super().reduce_scatter(buffer, group=group, own=own), "reduce_scatter", group)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        return self._watch(super().all_reduce(buffer, group=group), "all_reduce", group)

    def _watch(self, work: Work, name: str, group: Group) -> Work:
        what = (name, group.ranks, len(self.issued))
        self.happened.append(("issue", *what))
        return WatchedWork(inner=work, happened=self.happened, what=what)


def train(rank: int, plan: Plan, collectives: Collectives, *, breaks: bool = False) -> dict[str, Tensor]:
    """Weights after a few steps, before one of which a backward `breaks` in the first block, and is done again."""
    torch.manual_seed(1)
    model, batch = MODELS["gpt"]()
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, plan, collectives=collectives)
    for step in range(3):
        if isinstance(collectives, Watched):
            collectives.happened.clear()
        if breaks and step == 1:
            break_backward(model, batch(step, rank))
            assert [one[0] for one in collectives.happened if one[2] == MESH.replicate_group(rank)] == ["issue"]
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.core.wait_gathers()
    if isinstance(collectives, Watched):
        collectives.assert_all_waited()
        collectives.assert_same_order(engine.core.setting.groups.reduce)
        collectives.assert_same_order(engine.core.setting.groups.replicate)
    return model.state_dict()


def break_backward(model: nn.Module, batch: Batch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    block = model.blocks[0]
    handle = block.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        cross_entropy(model, batch).backward()
    handle.remove()


def watch(rank: int, plans: list[Plan]) -> list[list[Happening]]:
    """What happens in the last step of each plan."""
    found = []
    for plan in plans:
        watched = Watched(seed=rank)
        train(rank, plan, watched)
        found.append(watched.happened)
    return found


def test_slices_cross_while_later_buckets_are_reduced() -> None:
    plans = [Plan(strategy=name, mesh=MESH, reduces_in_flight=bound) for bound in (1, 2) for name in ("zero2", "fsdp")]
    for rank, steps in enumerate(run_ranks(watch, num_ranks=4, args=(plans,))):
        scatter, cross = ("reduce_scatter", MESH.shard_group(rank)), ("all_reduce", MESH.replicate_group(rank))
        for plan, happened in zip(plans, steps, strict=True):
            crossings = [one for one in happened if one[1:3] == cross]
            issues = [happened.index(one) for one in crossings if one[0] == "issue"]
            spans = [happened[start : happened.index(("wait", *happened[start][1:]))] for start in issues]
            issued_meanwhile = [any(one[:3] == ("issue", *scatter) for one in span) for span in spans]
            # When the last ones are waited for, nothing is left to be reduced.
            bound = plan.reduces_in_flight
            assert issued_meanwhile == [True] * (NUM_BUCKETS - bound) + [False] * bound
            # One bucket's slices are under way, and the next one's as those are waited for.
            changes = [1 if one[0] == "issue" else -1 for one in crossings]
            under_way = list(accumulate(changes))
            assert max(under_way) == 2
            assert under_way[-1] == 0


def weights_of(rank: int, reduce_dtype: str) -> list[dict[str, Tensor]]:
    """The same training: at once and late, of two strategies, and with a backward that breaks."""
    fsdp, zero2 = (Plan(strategy=name, mesh=MESH, reduce_dtype=reduce_dtype) for name in ("fsdp", "zero2"))
    return [
        train(rank, fsdp, BackendCollectives()),
        train(rank, fsdp, Watched(seed=rank)),
        train(rank, zero2, Watched(seed=rank)),
        train(rank, fsdp, Watched(seed=rank), breaks=True),
    ]


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_weights_are_the_same_bits_however_late_slices_arrive(reduce_dtype: str) -> None:
    """Also where a backward breaks while they are under way."""
    results = run_ranks(weights_of, num_ranks=4, args=(reduce_dtype,))
    expected = results[0][0]
    assert all(weight.isfinite().all() for weight in expected.values())
    for weights in (weights for of_rank in results for weights in of_rank):
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
