"""A large embedding or head is a unit of its own, whose parameters can be read wherever those of the root can."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from from_root import counted_as_large
from late import LateCollectives
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Plan
from shardwise.checkpoint import Checkpoints
from shardwise.comm.groups.collectives import BackendCollectives
from shardwise.engine.engine import engine_of, tape
from shardwise.engine.guards.guard import ShardedParameter
from shardwise.program import build

WIDTH, WORDS, LENGTH, RANKS = 8, 32, 5, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """`use`: the way in which the weights of the embedding and the head are used (USES)."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.number = use, 0
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return USES[self.use](self, self.norm(x), tokens)


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def _called(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    return _cross_entropy(model.head(x), tokens)


def _read(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    return _cross_entropy(F.linear(x, model.head.weight), tokens)


def _read_in_chunks(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    """Compute as chunked losses do: the logits of each chunk are computed again in backward."""

    def loss_of(part: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(part @ model.head.weight.t(), targets)

    chunks = zip(x.split(2, 1), tokens.split(2, 1), strict=True)
    return sum(checkpoint(loss_of, part, targets, use_reentrant=False) for part, targets in chunks)


def _tied_by_hand(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    return _cross_entropy(F.linear(x, model.embed.weight) + model.head(x), tokens)


def _embedded_twice(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    return _cross_entropy(model.head(x + model.embed(tokens.flip(0))), tokens)


def _by_turns(model: Model, x: Tensor, tokens: Tensor) -> Tensor:
    model.number += 1
    return (_read if model.number % 3 else _called)(model, x, tokens)


USES: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "called": _called,
    "read in forward": _read,
    "read in the loss": lambda model, x, tokens: x,
    "read in chunks": _read_in_chunks,
    "tied by hand": _tied_by_hand,
    "embedded twice": _embedded_twice,
    "by turns": _by_turns,
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    if model.use == "read in the loss":
        return _read(model, model(tokens), tokens)
    return model(tokens)


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))


def evaluated(model: nn.Module, *, step: int) -> list[float]:
    """Evaluate between two steps; the loss outside of the model would read what is freed with the root by then."""
    if model.use == "read in the loss":
        return []
    with torch.no_grad():
        return [model(tokens_of(100 + step, 0)).item()]


Seen = tuple[list[float], dict[str, Tensor]]


def prepared(use: str, strategy: str, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    """Return a prepared model whose layers count as large."""
    model = Model(use)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with counted_as_large(WORDS * WIDTH):
        shardwise.prepare(model, optimizer, Plan(strategy=strategy), watch_seconds=0.0, **options)
    assert {unit.name for unit in engine_of(model).core.followed.spec.units if unit.from_root} == {"embed", "head"}
    return model, optimizer


def on_a_rank(rank: int, use: str, strategy: str, late: bool) -> Seen:
    collectives = LateCollectives(BackendCollectives(), seed=rank) if late else None
    model, optimizer = prepared(use, strategy, collectives=collectives)
    seen: list[float] = []
    for step in range(4):
        loss = loss_of(model, tokens_of(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), *evaluated(model, step=step)]
    return seen, shardwise.full_state_dict(model)["model"]


def in_one_process(rank: int, use: str) -> Seen:
    """Train with the ranks' batches in turn; return what `rank` sees."""
    model = Model(use)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[float] = []
    for step in range(4):
        number, grads = model.number, []
        for other in range(RANKS):
            model.number = number
            loss = loss_of(model, tokens_of(step, other))
            loss.backward()
            grads.append([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
            seen += [loss.item()] if other == rank else []
        for parameter, *own in zip(model.parameters(), *grads, strict=True):
            parameter.grad = (own[0] + own[1]) / RANKS if own[0] is not None else None
        optimizer.step()
        optimizer.zero_grad()
        seen += evaluated(model, step=step)
    return seen, model.state_dict()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("strategy", "late"), [("fsdp", True), ("shard_grad_op", False), ("zero2", False)])
def test_every_use_of_their_weights_trains_as_one_process_does(use: str, strategy: str, late: bool) -> None:
    for rank, (seen, weights) in enumerate(run_ranks(on_a_rank, num_ranks=RANKS, args=(use, strategy, late))):
        expected, values = in_one_process(rank, use)
        assert seen == expected
        assert all(torch.equal(weights[name], value) for name, value in values.items())


def tapes(rank: int, use: str, strategy: str) -> list[list[str]]:
    model, optimizer = prepared(use, strategy)
    found = []
    with tape(model) as recorded:
        for step in range(2):
            loss_of(model, tokens_of(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([str(entry) for entry in recorded.take()])
    program = build(engine_of(model).core.followed.spec, plan=engine_of(model).core.followed.plan)
    return [*found, [str(operation) for operation in program.operations()]]


@pytest.mark.parametrize("use", ["called", "read in forward", "embedded twice"])
def test_after_the_first_step_the_tape_is_the_program(use: str) -> None:
    for _, later, program in run_ranks(tapes, num_ranks=RANKS, args=(use, "fsdp")):
        assert later == program


def test_a_head_that_is_called_is_freed_for_the_loss_and_one_that_is_read_is_not() -> None:
    for use, is_freed in {"called": True, "read in forward": False}.items():
        for _, later, _ in run_ranks(tapes, num_ranks=RANKS, args=(use, "fsdp")):
            loss = slice(later.index("forward head"), later.index("backward (root)"))
            assert ("free head" in later[loss], "gather head" in later[loss]) == (is_freed, is_freed)


def reads_between_steps(rank: int) -> None:
    model, optimizer = prepared("called", "fsdp")
    for step in range(2):
        loss_of(model, tokens_of(step, rank)).backward()
        with pytest.raises(ShardedParameter, match=r"head\.weight is sharded and freed"):
            model.head.weight.sum()
        optimizer.step()
        optimizer.zero_grad()
        evaluated(model, step=step)
        with pytest.raises(ShardedParameter, match=r"embed\.weight is sharded and freed"):
            model.embed.weight.sum()


def test_between_steps_they_are_refused_as_those_of_the_root_are() -> None:
    run_ranks(reads_between_steps, num_ranks=RANKS)


def through_a_checkpoint(rank: int, folder: str) -> None:
    """A checkpoint of the time when they lay in the root."""
    model = Model("called")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shardwise.prepare(model, optimizer, Plan(strategy="fsdp", units="blocks"), watch_seconds=0.0)
    loss_of(model, tokens_of(0, rank)).backward()
    optimizer.step()
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, step=1)
    loaded, its_optimizer = prepared("called", "fsdp")
    checkpoints.load(checkpoints.latest(), loaded, its_optimizer)
    checkpoints.close()
    saved, found = shardwise.full_state_dict(model, optimizer), shardwise.full_state_dict(loaded, its_optimizer)
    for part in ("model", "optimizer"):
        values, expected = (state[part].get("state", state[part]) for state in (found, saved))
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_a_checkpoint_from_before_is_loaded(tmp_path: Path) -> None:
    run_ranks(through_a_checkpoint, num_ranks=RANKS, args=(str(tmp_path),))
