"""Saved under any strategy, mesh and number of ranks; loaded under any other, and trained on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import AwkwardBlock, by_weight_decay
from ranks import run_ranks
from torch import Tensor, nn
from whole import whole

import shardwise
from shardwise.checkpoint import Checkpoints, open_checkpoint
from shardwise.engines import require_engine
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

STRATEGIES = {name: Plan(strategy=name) for name in ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")}
# hpz and hpz2: gathers inside the shard axis, states over all ranks.
HYBRID = {
    name: Plan(strategy="fsdp", across=across, mesh=Mesh(replicate=2, shard=2))
    for name, across in (("hybrid", "ddp"), ("hpz", "zero1"), ("hpz2", "zero2"))
}
RANKS = (1, 2, 3, 4)
# Checkpoints of the usual run: zero1 holds what zero2 holds between two steps, and shard_grad_op what fsdp holds.
SAVED = ("ddp", "zero2", "fsdp", "hybrid", "hpz")
# (ranks, kind) of a job, and the whole state of its model and optimizer.
Job = tuple[int, str]
State = dict[str, Any]


class Odd(nn.Module):
    """Sizes that divide by nothing, ties in and across units, a scalar, an empty and a frozen parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.blocks = nn.ModuleList(AwkwardBlock() for _ in range(2))
        self.blocks[1].outer.weight = self.blocks[0].outer.weight
        self.blocks[1].single.requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x) * self.scale) + self.empty.sum()


def kinds(num_ranks: int) -> dict[str, Plan]:
    return STRATEGIES | HYBRID if num_ranks == 4 else STRATEGIES


def prepared(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Odd()
    return shardwise.prepare(model, by_weight_decay(model.parameters()), plan)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(5, 7, generator=generator), torch.randn(5, 1, generator=generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_each_kind(rank: int, folder: str, num_ranks: int, names: list[str]) -> dict[Job, tuple[State, State]]:
    """The whole state after two steps, which is saved, and after two more that were not interrupted."""
    checkpoints = Checkpoints(folder, keep=100)
    states = {}
    for number, kind in enumerate(names):
        model, optimizer = prepared(kinds(num_ranks)[kind])
        train(model, optimizer, rank=rank, steps=range(2))
        own = {"rank": rank, "ones": torch.ones(rank)}
        checkpoints.save(model, optimizer, step=number, progress={"kind": kind}, own=own)
        # A copy, since buffers in a state dict are the model's own.
        saved = copy.deepcopy(shardwise.full_state_dict(model, optimizer))
        # Training goes on while it is written, and must not show in it.
        train(model, optimizer, rank=rank, steps=range(2, 4))
        states[num_ranks, kind] = saved, shardwise.full_state_dict(model, optimizer)
    checkpoints.close()
    return states


def load_into_each_kind(
    rank: int,
    folder: str,
    num_ranks: int,
    into: list[str],
    states: dict[Job, tuple[State, State]],
    alike: dict[Job, Job],
) -> list[tuple[Job, Job]]:
    """Load each job's checkpoint, and the same state as a full state dict, and take two steps from either."""
    checkpoints = Checkpoints(folder)
    names: dict[int, list[str]] = {}
    for ranks, kind in states:
        names.setdefault(ranks, []).append(kind)
    saved = {
        job: open_checkpoint(Path(folder, str(job[0]), f"step-{names[job[0]].index(job[1]):08}")) for job in states
    }
    pairs = []
    for kind in into:
        plan = kinds(num_ranks)[kind]
        model, optimizer = prepared(plan)
        other, others_optimizer = prepared(plan)
        finals: dict[Job, list[Any]] = {}
        for job, (state, final) in states.items():
            loaded = checkpoints.load(saved[job], model, optimizer)
            assert loaded.progress == {"kind": job[1]}
            check_own(loaded.own, rank=rank, expected=job[0] == num_ranks)
            shardwise.load_full_state_dict(other, others_optimizer, state)
            assert_same(held_values(model, optimizer), held_values(other, others_optimizer))
            train(model, optimizer, rank=rank, steps=range(2, 4))
            if job == (num_ranks, kind):
                shardwise.load_full_state_dict(other, others_optimizer, final)
                assert_same(held_values(model, optimizer), held_values(other, others_optimizer))
            elif alike[job] not in finals:
                train(other, others_optimizer, rank=rank, steps=range(2, 4))
                finals[alike[job]] = copy.deepcopy(held_values(other, others_optimizer))
            if job != (num_ranks, kind):
                assert_same(held_values(model, optimizer), finals[alike[job]])
            pairs.append((job, (num_ranks, kind)))
    checkpoints.close()
    return pairs


def check_own(own: dict[str, Any] | None, *, rank: int, expected: bool) -> None:
    assert (own is not None) == expected
    if own is not None:
        assert own["rank"] == rank
        assert own["ones"].tolist() == [1.0] * rank


def held_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that this rank holds: slices, their states, options; buffers on rank 0, whose are the ones that count."""
    mine = require_engine(model).held()
    values: list[Any] = [[group[key] for key in ("lr", "weight_decay")] for group in optimizer.param_groups]
    for part in mine.slices:
        if part.name != "empty":
            states = sorted(optimizer.state.get(part.parameter, {}).items())
            values += [part.name, part.start, part.stop, part.parameter.detach(), *states]
    return values + list(mine.buffers.values() if torch.distributed.get_rank() == 0 else [])


def assert_same(values: Any, expected: Any) -> None:
    """Bit for bit."""
    assert type(values) is type(expected)
    if isinstance(values, list | tuple):
        assert len(values) == len(expected)
        for value, wanted in zip(values, expected, strict=True):
            assert_same(value, wanted)
    else:
        assert torch.equal(values, expected) if isinstance(values, Tensor) else values == expected


def first_alike(states: dict[Job, tuple[State, State]]) -> dict[Job, Job]:
    """For each job the first whose state is the same bit for bit: on 1 and on 2 ranks strategies do not differ."""

    def flat(value: Any) -> Any:
        if isinstance(value, dict):
            return [flat(item) for item in value.values()]
        return [flat(item) for item in value] if isinstance(value, list) else value

    def same(one: Job, other: Job) -> bool:
        try:
            assert_same(flat(states[one][0]), flat(states[other][0]))
        except AssertionError:
            return False
        return True

    return {job: next(other for other in states if other == job or same(other, job)) for job in states}


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[Path, dict[Job, tuple[State, State]]]:
    folder, is_whole = tmp_path_factory.mktemp("checkpoints"), pytestconfig.getoption("--whole")
    states: dict[Job, tuple[State, State]] = {}
    for num_ranks in RANKS:
        names = [kind for kind in kinds(num_ranks) if is_whole or kind in SAVED]
        args = (str(folder / str(num_ranks)), num_ranks, names)
        states |= run_ranks(save_each_kind, num_ranks=num_ranks, args=args)[0]
    assert len(states) == (23 if is_whole else 14)
    return folder, states


EACH = [(num_ranks, list(kinds(num_ranks))) for num_ranks in RANKS]
"""529 pairs: 23 checkpoints, each into 23 jobs."""


# Every checkpoint into a number of ranks that divides nothing, and onto meshes of two axes.
SOME = [(3, ["fsdp"]), (4, ["hybrid", "hpz2"])]


@pytest.mark.parametrize(("num_ranks", "into"), [*SOME, *whole(*EACH)])
def test_every_checkpoint_loads_under_every_strategy_and_trains_on(saved: Any, num_ranks: int, into: list[str]) -> None:
    folder, states = saved
    args = (str(folder), num_ranks, into, states, first_alike(states))
    pairs = run_ranks(load_into_each_kind, num_ranks=num_ranks, args=args, timeout_seconds=100.0)
    assert pairs == [[(job, (num_ranks, kind)) for kind in into for job in states]] * num_ranks
