"""A rehearsal: rank 0 of a job whose other ranks are absent has the memory and the program of a real rank."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidPlan
from shardwise.comm.groups.agreement import exchange, meet
from shardwise.comm.groups.groups import Group
from shardwise.comm.job.absent import AbsentCollectives, absent_group, leave_out_reduce
from shardwise.engines import prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, ResNetShape
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, Mesh, placement_of

# Eight ranks cut its units into equal slices without padding.
GPT = GPTShape(num_layers=2, width=256, num_heads=4, vocab_size=128, max_seq=64)
RESNET = ResNetShape(
    block="basic", num_blocks=(1, 1, 1, 1), width=8, image_size=8, num_channels=1, num_classes=10, small_images=True
)


def group_of(size: int, *, index: int = 0) -> Group:
    return Group(handle=cast("dist.ProcessGroup", None), ranks=tuple(range(size)), index=index)


def started(plan: Plan, *, shape: GPTShape | ResNetShape = GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build_model(shape, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collectives = AbsentCollectives() if plan.engine == "shardwise" else None
    return prepare(model, optimizer, plan, device="cpu", collectives=collectives)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 2) -> list[float]:
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(GPT.vocab_size, (2, 9))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def num_elements(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    """Of what it steps, and of both of AdamW's moments."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return num_elements(stepped) + num_elements(moments)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_gather_tiles_the_own_slice_in_place(index: int) -> None:
    buffer = torch.full((12,), torch.nan)
    buffer[4 * index : 4 * index + 4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    address = buffer.data_ptr()
    AbsentCollectives().all_gather(buffer, group=group_of(3, index=index)).wait()
    assert buffer.tolist() == [1.0, 2.0, 3.0, 4.0] * 3
    assert buffer.data_ptr() == address


def test_a_gather_of_bytes_makes_no_nan_of_weights_in_fp8_or_bf16() -> None:
    pairs = torch.stack(torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij"), dim=-1)
    own = pairs.to(torch.uint8).flatten()
    buffer = torch.cat([own, torch.full_like(own, 255)])
    AbsentCollectives().all_gather(buffer, group=group_of(2)).wait()
    assert torch.equal(buffer[: own.numel()], own)
    others = buffer[own.numel() :]
    assert others.view(torch.float8_e4m3fn).float().isfinite().all()
    assert others.view(torch.bfloat16).float().isfinite().all()
    assert (others >> 1).equal(own >> 1)


def test_a_gather_of_one_rank_or_of_nothing_is_a_gather() -> None:
    buffer = torch.arange(4.0)
    AbsentCollectives().all_gather(buffer, group=group_of(1)).wait()
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]
    AbsentCollectives().all_gather(torch.empty(0), group=group_of(8)).wait()


def test_reduces_and_broadcasts_leave_what_is_there() -> None:
    buffer, collectives = torch.arange(6.0), AbsentCollectives()
    collectives.reduce_scatter(buffer, group=group_of(3)).wait()
    collectives.all_reduce(buffer, group=group_of(3)).wait()
    collectives.broadcast(buffer, source=2, group=group_of(3)).wait()
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(("strategy", "num_ranks"), [*((name, 8) for name in STRATEGIES), ("fsdp", 1), ("fsdp", 1024)])
def test_a_step_of_every_strategy_runs(strategy: str, num_ranks: int) -> None:
    with absent_group(num_ranks):
        model, optimizer = started(Plan(strategy=strategy))
        assert all(loss < 10 for loss in train(model, optimizer))


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_hybrid_mesh_and_recompute_run(strategy: str) -> None:
    with absent_group(8):
        plan = Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=4), recompute="full")
        train(*started(plan))


def test_a_model_with_buffers_runs() -> None:
    with absent_group(8):
        model, optimizer = started(Plan(strategy="fsdp"), shape=RESNET)
        for _ in range(2):
            model(torch.randn(2, 1, 8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_of_eight_holds_an_eighth_of_sharded_states(strategy: str) -> None:
    with absent_group(8):
        model, optimizer = started(Plan(strategy=strategy))
        train(model, optimizer)
        share = 8 if placement_of(strategy).optim is SHARDED else 1
        assert state_elements(optimizer) * share == 3 * GPT.num_params


def test_a_rehearsal_can_follow_another_of_a_different_size() -> None:
    sizes = {}
    for num_ranks in (8, 2, 8):
        with absent_group(num_ranks):
            model, optimizer = started(Plan(strategy="fsdp"))
            train(model, optimizer)
            sizes.setdefault(num_ranks, []).append(state_elements(optimizer))
        assert not dist.is_initialized()
    assert sizes[8][0] == sizes[8][1]
    assert sizes[2][0] == 4 * sizes[8][0]


def test_torchs_own_engines_run_as_well() -> None:
    """One test, since torch 2.11 remembers the process groups of a mesh by name when they are gone."""
    with absent_group(8):
        for strategy in ("ddp", "shard_grad_op", "fsdp"):
            model, optimizer = started(Plan(strategy=strategy, engine="torch"))
            leave_out_reduce(model)
            train(model, optimizer)
            held: Any = [getattr(p, "_local_tensor", p) for p in model.parameters()]
            share = 1 if strategy == "ddp" else 8
            assert num_elements(held) * share == GPT.num_params, strategy


def test_everybody_absent_says_what_this_rank_says() -> None:
    with absent_group(5):
        assert exchange("here") == ["here"] * 5


def test_in_a_rehearsal_nobody_waits_for_the_others() -> None:
    with absent_group(3):
        meet("a meeting", limit_seconds=60)


def test_a_rehearsal_ends_its_group_also_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="oops"), absent_group(2):
        raise RuntimeError("oops")
    assert not dist.is_initialized()


def test_a_rehearsal_within_a_job_or_of_no_ranks_is_refused() -> None:
    with absent_group(2), pytest.raises(InvalidPlan, match="a process group is there already"), absent_group(2):
        pass
    with pytest.raises(InvalidPlan, match="must be a whole number of at least 1"), absent_group(0):
        pass
