"""Collectives whose rounds grow with the logarithm of the number of ranks, on real ranks."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from whole import whole

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.comm.groups.agreement import all_alike, any_rank, by_first, distinct
from shardwise.comm.groups.small_collectives import from_first, largest
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan
from shardwise.state.checkpoint import parts as checkpoint_parts
from shardwise.state.checkpoint.ranks import Ranks
from shardwise.state.checkpoint.verify import verify


def collectives(rank: int) -> None:
    count = dist.get_world_size()
    for first in range(count):
        # Whoever has the largest number, all learn of it.
        numbers = [(rank - first) % count, -((rank - first) % count)]
        assert largest(numbers) == [count - 1, 0]
        assert any_rank(rank == first)
    assert not any_rank(False)
    assert from_first(rank) == 0
    assert by_first(lambda: f"of {rank}") == "of 0"
    assert all_alike("one text")
    assert all_alike(str(rank)) == (count == 1)
    assert distinct("one") == ["one"]
    assert sorted(distinct(f"{rank % 2}")) == ["0", "1"][: min(2, count)]
    ranks = Ranks()
    assert ranks.merge_on_first([rank], list.__add__) == (list(range(count)) if rank == 0 else None)
    assert ranks.failures("bad" if rank == count - 1 else None) == {count - 1: "bad"}
    assert ranks.failures(None) == {}
    ranks.leave()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, *whole(4, 5)])
def test_all_ranks_get_the_same(num_ranks: int) -> None:
    run_ranks(collectives, num_ranks=num_ranks)


SHAPE = GPTShape(num_layers=2, width=24, num_heads=2, vocab_size=61, max_seq=16)


def trained(plan: Plan, *, rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build_model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shardwise.prepare(model, optimizer, plan)
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(rank))
    model(ids)[..., :61].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved_as_slices(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = trained(Plan(strategy="fsdp"), rank=rank)
    checkpoints = Checkpoints(folder)
    with patch.object(checkpoint_parts, "MOST_LISTED_SLICES", 0):
        checkpoints.save(model, optimizer, step=1)
        checkpoints.wait()
    checkpoints.close()
    state: dict[str, torch.Tensor] = shardwise.full_state_dict(model)["model"]
    return state


def loaded(rank: int, folder: str, plan: Plan) -> dict[str, torch.Tensor]:
    model, optimizer = trained(plan, rank=rank)
    checkpoints = Checkpoints(folder)
    saved = checkpoints.latest()
    assert saved is not None
    assert any(tensor.runs for tensor in saved.manifest.tensors.values())
    checkpoints.load(saved, model, optimizer)
    checkpoints.close()
    state: dict[str, torch.Tensor] = shardwise.full_state_dict(model)["model"]
    return state


def test_a_manifest_of_slices_is_loaded_on_other_ranks_and_verified(tmp_path: Path) -> None:
    (state, *_) = run_ranks(saved_as_slices, num_ranks=3, args=(str(tmp_path),))
    manifest = verify(tmp_path / "step-00000001")
    assert not any(tensor.listed for tensor in manifest.tensors.values())
    for num_ranks, plan in ((2, Plan(strategy="fsdp")), (3, Plan(strategy="zero1"))):
        for other in run_ranks(loaded, num_ranks=num_ranks, args=(str(tmp_path), plan)):
            assert {name for name, value in state.items() if not torch.equal(other[name], value)} == set()
