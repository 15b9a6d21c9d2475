"""Checkpoints of several ranks: other engines, torch's own load, failures of one rank, ranks that are killed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_disks import FailingDisk
from cases import GPT, adamw, make_tokens
from ranks import RankFailed, run_ranks, shut_down
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as torchs_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import line, make_collectives

import shardwise
from shardwise.checkpoint import CheckpointReader, Checkpoints, open_checkpoint
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

FSDP = Plan(strategy="fsdp")


def prepared(plan: Plan, *, shape: GPTShape = GPT, **options: Any) -> Any:
    torch.manual_seed(3)
    model, batch = make_tokens(shape)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan, **options)
    return model, optimizer, batch


def train(model: nn.Module, optimizer: Any, batch: Any, *, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = cross_entropy(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# Through other plans of ours


def between_plans(rank: int, folder: str, plans: list[Plan]) -> int:
    """Each plan's checkpoint goes into the next plan's model, which trains on as the first would have."""
    checkpoints = Checkpoints(folder)
    for number, (plan, other) in enumerate(pairwise(plans)):
        model, optimizer, batch = prepared(plan)
        train(model, optimizer, batch, rank=rank, steps=range(2))
        checkpoints.save(model, optimizer, step=number)
        full = shardwise.full_state_dict(model, optimizer)
        target, targets_optimizer, _ = prepared(other)
        checkpoints.load(checkpoints.latest(), target, targets_optimizer)
        assert equal(shardwise.full_state_dict(target, targets_optimizer), full), (plan, other)
        losses = train(target, targets_optimizer, batch, rank=rank, steps=range(2, 4))
        if other.precision == plan.precision:
            assert losses == train(model, optimizer, batch, rank=rank, steps=range(2, 4))
    checkpoints.close()
    return len(plans) - 1


def padded(rank: int, folder: str) -> int:
    """A vocabulary of 31 in 128 rows: of the embedding rank 1 holds nothing but padding. Between plans and engines."""
    checkpoints = Checkpoints(folder)
    plans = [Plan(strategy="fsdp"), Plan(strategy="ddp"), Plan(strategy="fsdp", engine="torch"), Plan(strategy="zero2")]
    for number, (plan, other) in enumerate(pairwise(plans)):
        model, optimizer, batch = prepared(plan, shape=replace(GPT, vocab_multiple=128))
        train(model, optimizer, batch, rank=rank, steps=range(2))
        checkpoints.save(model, optimizer, step=number)
        saved = checkpoints.latest()
        assert saved is not None
        assert saved.manifest.contents.parameters["embed.weight"][0] == [31, GPT.width]
        target, targets_optimizer, _ = prepared(other, shape=replace(GPT, vocab_multiple=128))
        checkpoints.load(saved, target, targets_optimizer)
        full = shardwise.full_state_dict(model)["model"]
        assert equal(shardwise.full_state_dict(target)["model"], full), (plan, other)
        assert full["embed.weight"].shape[0] == 128
        assert not full["embed.weight"][31:].any()
        losses = train(target, targets_optimizer, batch, rank=rank, steps=range(2, 4))
        assert losses == train(model, optimizer, batch, rank=rank, steps=range(2, 4)), (plan, other)
    checkpoints.close()
    return len(plans) - 1


def test_a_padded_vocabulary_goes_between_plans_and_engines_without_its_padding(tmp_path: Path) -> None:
    assert run_ranks(padded, num_ranks=2, args=(str(tmp_path),)) == [3, 3]


def test_offloaded_mixed_and_bf16_plans_load_each_others_fp32_masters(tmp_path: Path) -> None:
    plans = [
        Plan(strategy="zero2", offload_states=True),
        Plan(strategy="ddp", overrides={"blocks.1": "fsdp", "blocks.2": "zero1"}),
        Plan(strategy="fsdp", offload_states=True),
        Plan(strategy="zero1"),
        Plan(strategy="ddp", precision="bf16"),
        Plan(strategy="zero2", precision="bf16"),
        Plan(strategy="fsdp", precision="bf16", offload_states=True),
    ]
    assert run_ranks(between_plans, num_ranks=2, args=(str(tmp_path), plans)) == [6, 6]


def after_a_late_gather(rank: int, folder: str) -> None:
    """zero1 gathers the new parameters after a step: until it has arrived, what the rank owns is not to be read."""
    model, optimizer, batch = prepared(Plan(strategy="zero1"), collectives=make_collectives(late=True, rank=rank))
    train(model, optimizer, batch, rank=rank, steps=range(1))
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, step=1)
    other, others_optimizer, _ = prepared(FSDP)
    checkpoints.load(checkpoints.latest(), other, others_optimizer)
    expected = shardwise.full_state_dict(model, optimizer)
    assert equal(shardwise.full_state_dict(other, others_optimizer), expected)
    checkpoints.close()


def test_a_save_waits_for_the_gather_that_follows_a_step(tmp_path: Path) -> None:
    run_ranks(after_a_late_gather, num_ranks=2, args=(str(tmp_path),))


# Who writes what


def written_bytes(rank: int, folder: str, plans: list[Plan]) -> list[int]:
    sizes = []
    checkpoints = Checkpoints(folder, keep=len(plans))
    for number, plan in enumerate(plans):
        model, optimizer, batch = prepared(plan)
        train(model, optimizer, batch, rank=rank, steps=range(1))
        sizes.append(checkpoints.save(model, optimizer, step=number).num_bytes)
    checkpoints.close()
    return sizes


def test_every_element_is_written_once_and_all_ranks_write_alike(tmp_path: Path) -> None:
    plans = [Plan(strategy="ddp"), Plan(strategy="zero1", mesh=Mesh(replicate=2, shard=2)), FSDP]
    of_ranks = run_ranks(written_bytes, num_ranks=4, args=(str(tmp_path), plans))
    num_parameters = sum(parameter.numel() for parameter in make_tokens(GPT)[0].parameters())
    for number, sizes in enumerate(zip(*of_ranks, strict=True)):
        assert sum(sizes) == 3 * 4 * num_parameters
        stored = open_checkpoint(tmp_path / f"step-{number:08}").manifest
        assert len(stored.files) == 4
    ddp, hybrid, _ = zip(*of_ranks, strict=True)
    num_tensors = 3 * len(list(make_tokens(GPT)[0].parameters()))
    assert max(ddp) - min(ddp) <= 4 * num_tensors
    # What the two ranks of a replica pair write together is a slice of equal size; the padding lies in the last.
    assert max(hybrid) - min(hybrid) <= 4 * num_tensors + max(hybrid) // 5


# torch's own engine, and its own load


@pytest.fixture
def fresh_ranks() -> None:
    """torch 2.11 remembers the process groups of a mesh by name, and the pool destroys them after a body."""
    shut_down()


def between_engines(rank: int, folder: str) -> None:
    plans = [
        Plan(strategy="ddp", engine="torch"),
        Plan(strategy="fsdp"),
        Plan(strategy="fsdp", engine="torch"),
        Plan(strategy="ddp"),
        Plan(strategy="shard_grad_op", engine="torch"),
        Plan(strategy="ddp", engine="torch"),
    ]
    before = prepared(plans[0])
    train(*before, rank=rank, steps=range(2))
    checkpoints = Checkpoints(folder)
    for number, plan in enumerate(plans[1:]):
        checkpoints.save(*before[:2], step=number)
        after = prepared(plan)
        checkpoints.load(checkpoints.latest(), *after[:2])
        full, found = shardwise.full_state_dict(*before[:2]), shardwise.full_state_dict(*after[:2])
        assert equal(found["model"], full["model"])
        assert equal(found["optimizer"]["state"], full["optimizer"]["state"])
        steps = range(number + 2, number + 4)
        # On 2 ranks both engines add the same numbers in the same order.
        assert train(*after, rank=rank, steps=steps) == train(*before, rank=rank, steps=steps)
        before = after
    checkpoints.close()


def test_checkpoints_go_between_our_engine_and_torchs_with_optimizer_state(tmp_path: Path, fresh_ranks: None) -> None:
    run_ranks(between_engines, num_ranks=2, args=(str(tmp_path),))


def save_hybrid(rank: int, folder: str) -> Any:
    plan = Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=2))
    model, optimizer, batch = prepared(plan)
    train(model, optimizer, batch, rank=rank, steps=range(2))
    Checkpoints(folder, asynchronous=False).save(model, optimizer, step=2)
    return shardwise.full_state_dict(model, optimizer)


def torch_alone_loads(rank: int, path: str, expected: Any) -> None:
    """No Shardwise model here: a plain `fully_shard`, a plain model, and torch.distributed.checkpoint.load."""
    torch.manual_seed(99)
    model = make_tokens(GPT)[0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    moments = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    state = {"model": model.state_dict(), "optimizer": {"exp_avg": moments}}
    torchs_load(state, storage_reader=CheckpointReader(path))
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), expected["model"][name]), name
    for name, moment in moments.items():
        assert torch.equal(moment.full_tensor(), expected["optimizer"]["state"][name]["exp_avg"]), name
    plain = make_tokens(GPT)[0]
    torchs_load({"model": plain.state_dict()}, storage_reader=CheckpointReader(path))
    assert equal(dict(plain.state_dict()), expected["model"])


def test_torchs_own_load_fills_fully_shard_and_plain_models_with_our_reader(tmp_path: Path, fresh_ranks: None) -> None:
    expected = run_ranks(save_hybrid, num_ranks=4, args=(str(tmp_path),))[0]
    run_ranks(torch_alone_loads, num_ranks=3, args=(str(tmp_path / "step-00000002"), expected))


# What goes wrong on one rank


def fail_at_every_effect(rank: int, folder: str) -> list[int]:
    """Rank by rank and effect by effect: a save fails on all ranks alike, and the one before it is the latest."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan(strategy="zero1"))
    counted = FailingDisk()
    checkpoints = Checkpoints(folder, disk=counted)
    checkpoints.save(model, step=1)
    checkpoints.wait()
    counts: list[int] = [0, 0]
    dist.all_gather_object(counts, counted.count)
    for failing in (1, 0):
        for at in range(1, counts[failing] + 1):
            checkpoints._disk = FailingDisk(at=at if rank == failing else 0)
            checkpoints.save(model, step=2)
            said = line(checkpoints.wait)
            assert f"step 2 was not written: rank {failing}: OSError: [Errno 5]" in said
            # The last effect of rank 0 follows the rename, whose checkpoint is whole.
            renamed = failing == 0 and at == counts[0]
            assert checkpoints.latest().step == (2 if renamed else 1)
    checkpoints.close()
    return counts


def test_an_error_at_any_effect_of_any_rank_fails_the_save_on_all_and_harms_nothing(tmp_path: Path) -> None:
    counts = run_ranks(fail_at_every_effect, num_ranks=2, args=(str(tmp_path),))[0]
    assert counts[0] > counts[1] >= 4


def save_until_killed(rank: int, folder: str, at: int) -> None:
    model, optimizer, batch = prepared(FSDP)
    checkpoints = Checkpoints(folder)
    train(model, optimizer, batch, rank=rank, steps=range(1))
    checkpoints.save(model, optimizer, step=1)
    checkpoints.wait()
    checkpoints._disk = FailingDisk(at=at if rank == 1 else 0, kill=True)
    checkpoints.save(model, optimizer, step=2)
    train(model, optimizer, batch, rank=rank, steps=range(1, 50))


def latest_step(rank: int, folder: str) -> int:
    model, optimizer, _ = prepared(Plan(strategy="ddp"))
    checkpoints = Checkpoints(folder)
    step = checkpoints.load(checkpoints.latest(), model, optimizer).step
    checkpoints.close()
    return step


@pytest.mark.parametrize("at", [1, 20])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, at: int) -> None:
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(save_until_killed, num_ranks=2, args=(str(tmp_path), at))
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".saving-")]) == 1
    assert run_ranks(latest_step, num_ranks=2, args=(str(tmp_path),)) == [1, 1]


def misuse(rank: int, folder: str) -> list[str]:
    model, optimizer, batch = prepared(Plan(strategy="ddp"))
    checkpoints = Checkpoints(folder)
    with shardwise.accumulate(model):
        cross_entropy(model, batch(0, rank)).backward()
    lines = [line(partial(checkpoints.save, model, optimizer, step=1))]
    optimizer.zero_grad()
    lines.append(line(partial(checkpoints.save, model, optimizer, step=rank)))
    own = {"set": {1}} if rank == 1 else {}
    lines.append(line(partial(checkpoints.save, model, optimizer, step=1, own=own)))
    plain = make_tokens(GPT)[0]
    lines.append(line(partial(checkpoints.save, plain, step=1)))
    checkpoints.close()
    assert not list(Path(folder).iterdir())
    return lines


def test_misuse_is_one_line_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(misuse, num_ranks=2, args=(str(tmp_path),))
    assert "a checkpoint in the middle of an accumulation" in first[0]
    assert first[1] == second[1] == "ranks save different steps: 0, 1"
    assert first[2] == f"rank 1 could not continue: {second[2]}"
    assert second[2].startswith("own.set is a set")
    assert first[3].startswith("this GPT has not been through shardwise.prepare")
