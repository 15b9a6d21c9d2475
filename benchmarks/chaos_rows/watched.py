"""Rows 10, 11 and 13: hangs, collectives in the wrong order, and bits that flip in one replica."""

import random
from itertools import product
from pathlib import Path

import test_same_order as order
import torch
import torch.distributed as dist
from ranks import run_ranks
from scorecard import Asked, Fault, Tally
from test_watch import WATCH_SECONDS, started
from training import line

from shardwise.comm.watch import EXIT_CODE
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

# The fault of rank 1, the strategy, and what rank 0 must say of it.
STOPS = {
    ("stopped", "fsdp"): ("rank 1 stopped", "rank 0 waiting in gather blocks.0, step 4"),
    ("stopped", "ddp"): ("rank 1 stopped", "rank 0 waiting in reduce blocks."),
    ("data", "fsdp"): ("rank 1 stopped", "between steps", "rank 0 waiting in"),
    ("data", "ddp"): ("rank 1 stopped", "between steps", "rank 0 waiting in"),
    ("evaluation", "fsdp"): ("rank 1 stopped", "evaluation, in forward blocks.2", "rank 0 waiting in"),
    ("skip reduce", "fsdp"): ("of the reduce group", "rank 0 issued reduce blocks.", "rank 1 reduce b"),
    ("extra reduce", "fsdp"): ("of the reduce group", "rank 0 issued reduce blocks.", "rank 1 red"),
}
# Strategies with collectives of that kind; each waits for its own at another time.
SWAPS = [
    ("swap reduce", "ddp"),
    ("swap reduce", "zero2"),
    ("swap reduce", "fsdp"),
    ("swap gather", "zero1"),
    ("swap gather", "fsdp"),
]
COMPARE_EVERY = 5


def hangs(asked: Asked) -> Tally:
    tally = Tally()
    slowest = 0.0
    for number, ((fault, strategy), words) in enumerate(list(STOPS.items()) * asked.pick(short=1, long=2)):
        with tally.trying(f"{fault}, {strategy}"):
            folder = asked.folder / str(number)
            folder.mkdir()
            slowest = max(slowest, check_hang(fault, strategy, words, folder=folder))
    tally.found["limit"] = f"{WATCH_SECONDS:g} s"
    tally.found["slowest report after the limit"] = f"{slowest - WATCH_SECONDS:.1f} s"
    return tally


def check_hang(fault: str, strategy: str, words: tuple[str, ...], *, folder: Path) -> float:
    """Seconds from the fault to the end of the last rank that could still end."""
    ended = [rank for rank in started(fault, strategy, folder) if rank.code is not None]
    assert len(ended) == (1 if fault == "stopped" else 2), "a rank did not end"
    for rank in ended:
        # A rank may lose its connection to the one that ended first while it is ending itself.
        assert rank.code in (EXIT_CODE, 1), f"exit code {rank.code}: {rank.output}"
        missing = [word for word in words if word not in rank.verdict]
        assert not missing, f"{missing} is not in {rank.verdict}"
        assert rank.seconds < WATCH_SECONDS + 5, f"ended {rank.seconds - WATCH_SECONDS:.1f} s after the limit"
    return max(rank.seconds for rank in ended)


def swaps(asked: Asked) -> Tally:
    """Each is done in the third step, and `swaps` sees to it that no rank has changed a weight when it is refused."""
    tally = Tally()
    for (fault, strategy), late in product(SWAPS, (False, True)):
        for _ in range(asked.pick(short=1, long=5)):
            with tally.trying(f"{fault}, {strategy}, late {late}"):
                told = run_ranks(order.swaps, num_ranks=2, args=(fault, strategy, late), timeout_seconds=120.0)
                kind = fault.split()[1]
                for refused in told:
                    assert "ranks issued different collectives in one step: as number " in refused, refused
                    assert f"rank 0 issued {kind} blocks." in refused, refused
                    assert f"rank 1 {kind} blocks." in refused, refused
    return tally


def flip_bit(rank: int, kind: str, precision: str, seed: int) -> tuple[list[str], int]:
    """One rank's copy of one element changes in one bit; what is refused then, and after how many steps.

    Under zero1 and zero2 the copy that is computed with is gathered again after each update, which mends it: there the
    bit flips in the step of the comparison. All other copies stay as they are until they are compared.
    """
    chance = random.Random(seed)
    mended = kind in ("zero1", "zero2")
    mesh = Mesh(replicate=2, shard=dist.get_world_size() // 2) if kind == "hybrid" else None
    plan = Plan(strategy="fsdp" if kind == "hybrid" else kind, precision=precision, mesh=mesh)
    model, optimizer = order.prepared(plan, compare_every=COMPARE_EVERY)
    before = COMPARE_EVERY - 1 if mended else chance.randint(1, COMPARE_EVERY)
    order.train(model, optimizer, rank, num_steps=before)
    engine_of(model).runner.wait_gathers()
    flipped = chance.randrange(dist.get_world_size())
    flat = chance.choice(list(engine_of(model).flats))
    told = [""]
    if rank == flipped:
        if mended:
            index = chance.randrange(len(flat.names))
            name, values = flat.names[index], flat.full_views[index].view(-1)
        else:
            part = chance.choice(list(flat.owned))
            name, values = flat.names[part.index], flat.master[part.start : part.stop]
        told = [name]
        # Beneath autograd: memory that goes wrong tells nobody.
        bits = values.detach().data.view(torch.int32 if values.element_size() == 4 else torch.int16)
        bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(8 * values.element_size() - 2)
    dist.broadcast_object_list(told, src=flipped)
    for number in range(1, 2 * COMPARE_EVERY + 1):
        order.backward(model, rank)
        refused = line_or_none(optimizer)
        if refused is not None:
            return [refused, told[0], f"rank {flipped}"], number
        optimizer.zero_grad()
    return ["it was not found", told[0], f"rank {flipped}"], number


def line_or_none(optimizer: torch.optim.Optimizer) -> str | None:
    """The line that a step is refused with."""
    told = []

    def step() -> None:
        optimizer.step()
        told.append("stepped")

    try:
        return line(step)
    except BaseException:
        # `line` asks for a refusal, and this step was none.
        if told:
            return None
        raise


def flips(asked: Asked) -> Tally:
    tally = Tally()
    most = 0
    for number in range(asked.pick(short=6, long=60)):
        strategy = ("ddp", "hybrid", "ddp", "hybrid", "zero1", "zero2")[number % 6]
        precision = asked.chance.choice(("fp32", "bf16"))
        num_ranks = asked.chance.choice((2, 4) if strategy == "hybrid" else (2, 3, 4))
        seed = asked.chance.randrange(2**32)
        with tally.trying(f"{strategy}, {precision}, {num_ranks} ranks, seed {seed}"):
            args = (strategy, precision, seed)
            for (refused, name, flipped), steps in run_ranks(
                flip_bit, num_ranks=num_ranks, args=args, timeout_seconds=120.0
            ):
                assert f"{name} is no longer the same on all ranks" in refused, f"{name}: {refused}"
                assert flipped in refused, f"{flipped}: {refused}"
                assert steps <= COMPARE_EVERY, f"found after {steps} steps"
                most = max(most, steps)
    tally.found["compared every"] = f"{COMPARE_EVERY} steps"
    tally.found["found after at most"] = f"{most} steps"
    return tally


ROWS = [
    Fault(
        name="10",
        shows="a stopped rank, one that is late with its data or in evaluation; a skipped or an extra collective",
        must_be="rank and operation named in < 5 s after the limit",
        run=hangs,
    ),
    Fault(
        name="11",
        shows="swapped collectives of equal size, also under the late backend",
        must_be="caught before the optimizer step",
        run=swaps,
    ),
    Fault(
        name="13",
        shows="one bit flipped in one replica",
        must_be="found within N steps, parameter and rank named",
        run=flips,
    ),
]
