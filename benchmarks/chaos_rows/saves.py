"""Rows 4 to 6: saves that crash, damaged checkpoints, full disks."""

import copy
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_disks import FailingDisk, FullDisk
from cases import GPT, adamw, make_tokens
from ranks import RankFailed, run_ranks
from scorecard import Asked, Tally
from state.checkpoint.test_crash import crash_at, crashed_past, effects_of_a_save
from torch import Tensor
from training import line

import shardwise
from shardwise.checkpoint import CheckpointError, Checkpoints, open_checkpoint
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

FSDP = Plan(strategy="fsdp")
Weights = dict[str, Tensor]


def prepared(plan: Plan = FSDP) -> Any:
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    return model, optimizer, batch


def step(model: Any, optimizer: Any, batch: Any, *, rank: int, number: int) -> None:
    cross_entropy(model, batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_two(rank: int, folder: str, failing: int = -1, at: int = 0) -> tuple[list[Weights], int]:
    """Checkpoints of steps 1 and 2. In the second, rank `failing` is killed at its `at`-th effect on the disk.

    Returned are the weights of both, and how many effects the second save had on this rank.
    """
    model, optimizer, batch = prepared()
    checkpoints = Checkpoints(folder)
    weights = []
    disk = FailingDisk(at=at if rank == failing else 0, kill=True)
    for number in (1, 2):
        step(model, optimizer, batch, rank=rank, number=number)
        if number == 2:
            checkpoints._disk = disk
        checkpoints.save(model, optimizer, step=number)
        checkpoints.wait()
        weights.append(copy.deepcopy(shardwise.full_state_dict(model)["model"]))
    checkpoints.close()
    return weights, disk.count


def loaded(rank: int, folder: str) -> tuple[int, Weights, set[float]]:
    """What the last good checkpoint holds, under another strategy: its step, weights, and the optimizer's steps."""
    model, optimizer, _ = prepared(Plan(strategy="zero2"))
    checkpoints = Checkpoints(folder)
    found = checkpoints.load(checkpoints.latest(), model, optimizer).step
    checkpoints.close()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return found, shardwise.full_state_dict(model)["model"], steps


def check_loaded(folder: Path, *, weights: list[Weights]) -> int:
    """The step of the last good checkpoint, all of which is of that step on every rank."""
    results = run_ranks(loaded, num_ranks=2, args=(str(folder),), timeout_seconds=120.0)
    number = results[0][0]
    for found, values, steps in results:
        assert found == number, "ranks loaded different steps"
        assert steps == {float(number)}, "a mixed step"
        assert_weights(values, weights[number - 1])
    return number


def assert_weights(found: Weights, expected: Weights) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} is not of its step"


def crashes(asked: Asked) -> Tally:
    tally = Tally()
    past = crashed_past(asked.folder / "past")
    effects = effects_of_a_save(past, asked.folder / "all")
    for power in (False, True):
        for at in range(1, len(effects) + 1):
            with tally.trying(f"one process, effect {at} of {len(effects)}, loss of power {power}"):
                folder = asked.folder / f"{power}-{at}"
                crash_at(past, folder, at=at, power=power)
                shutil.rmtree(folder)
    results = run_ranks(save_two, num_ranks=2, args=(str(asked.folder / "whole"),), timeout_seconds=120.0)
    weights = results[0][0]
    points = [(rank, at) for rank, (_, count) in enumerate(results) for at in range(1, count + 1)]
    if not asked.long:
        points = sorted(asked.chance.sample(points, 10))

    def loaded_after(rank: int, at: int) -> int:
        folder = asked.folder / f"killed-{rank}-{at}"
        with pytest.raises(RankFailed, match="exit code -9"):
            run_ranks(save_two, num_ranks=2, args=(str(folder), rank, at), timeout_seconds=120.0)
        return check_loaded(folder, weights=weights)

    # Ranks wait for each other most of the time: two jobs share the cores well.
    with ThreadPoolExecutor(2) as threads:
        found = {point: threads.submit(loaded_after, *point) for point in points}
        for (rank, at), number in found.items():
            with tally.trying(f"2 ranks, rank {rank} killed at effect {at}"):
                # The rename is the last but one effect of rank 0; what it has named is whole.
                committed = rank == 0 and at == results[0][1]
                assert number.result() == (2 if committed else 1)
    return tally


def damages(asked: Asked) -> Tally:
    """Checkpoints of two ranks, of which the newer gets one byte changed, or is cut, at a place drawn from all."""
    tally = Tally()
    original = asked.folder / "original"
    weights = run_ranks(save_two, num_ranks=2, args=(str(original),), timeout_seconds=120.0)[0][0]
    files = sorted((original / "step-00000002").iterdir())
    for number in range(200):
        path = files[number % len(files)]
        place = asked.chance.randrange(path.stat().st_size)
        flip = asked.chance.randrange(1, 256) if asked.chance.random() < 0.75 else 0
        with tally.trying(f"{path.name}, byte {place}, {f'xor {flip}' if flip else 'cut'}"):
            folder = asked.folder / "damaged"
            shutil.copytree(original, folder)
            try:
                damage(folder / "step-00000002" / path.name, place=place, flip=flip)
                check_damaged(folder, path.name, weights=weights[0])
            finally:
                shutil.rmtree(folder)
    return tally


def damage(path: Path, *, place: int, flip: int) -> None:
    content = bytearray(path.read_bytes())
    if flip:
        content[place] ^= flip
    else:
        del content[place:]
    path.write_bytes(content)


def check_damaged(folder: Path, name: str, *, weights: Weights) -> None:
    """The damaged one is refused by its file, and the one before it is used and that is said."""
    with pytest.raises(CheckpointError, match=f"step-00000002/{name}"):
        open_checkpoint(folder / "step-00000002")
    checkpoints = Checkpoints(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = checkpoints.latest()
    said = [str(item.message) for item in caught if "passed over" in str(item.message)]
    assert len(said) == 1, said
    assert "step-00000002" in said[0], said
    model = make_tokens(GPT)[0]
    assert checkpoints.load(saved, model).step == 1
    assert_weights(model.state_dict(), weights)


def save_on_full_disks(rank: int, folder: str, shares: list[float]) -> list[str]:
    """For each share: a save on a disk of one rank that has room for that share of it. "" where it was as it must."""
    model, optimizer, batch = prepared()
    checkpoints = Checkpoints(folder)
    step(model, optimizer, batch, rank=rank, number=1)
    measured = FullDisk()
    checkpoints._disk = measured
    checkpoints.save(model, optimizer, step=1)
    checkpoints.wait()
    sizes: list[int] = [0, 0]
    dist.all_gather_object(sizes, measured.written)
    step(model, optimizer, batch, rank=rank, number=2)
    told = []
    for number, share in enumerate(shares):
        failing = number % 2
        room_bytes = int(share * sizes[failing])
        checkpoints._disk = FullDisk(room_bytes=room_bytes) if rank == failing else FullDisk()
        checkpoints.save(model, optimizer, step=2)
        said = line(checkpoints.wait)
        saved = checkpoints.latest()
        good = f"step 2 was not written: rank {failing}: OSError: [Errno 28] No space left" in said
        left = [path.name for path in Path(folder).iterdir()]
        told.append("" if good and saved.step == 1 and left == ["step-00000001"] else f"{said} | {saved} | {left}")
    checkpoints.close()
    return told


def full_disks(asked: Asked) -> Tally:
    tally = Tally()
    shares = sorted(asked.chance.uniform(0, 1) for _ in range(20))
    folder = asked.folder / "full"
    told = run_ranks(save_on_full_disks, num_ranks=2, args=(str(folder), shares), timeout_seconds=200.0)
    first = run_ranks(save_two, num_ranks=2, args=(str(asked.folder / "good"),))[0][0]
    for share, lines in zip(shares, zip(*told, strict=True), strict=True):
        with tally.trying(f"full after {share:.0%} of a rank's file"):
            assert lines == ("", ""), lines
            assert check_loaded(folder, weights=first) == 1
    return tally
