"""The gradients of large units are reduced in pieces: less memory at a time, and the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MODELS, adamw, make_awkward, squares
from late import LateCollectives
from ranks import run_ranks
from test_accumulate import accumulated, micro_batches
from test_reduce import break_backward
from test_tape import compare_with_program
from torch import Tensor
from training import Case, Result, assert_equal, make_collectives, on_ranks, one_process
from whole import whole

import shardwise
from shardwise.comm.groups.collectives import BackendCollectives
from shardwise.engine.engine import engine_of
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

# A block of the GPT has 17 kB of gradients in fp32, the root 4 kB.
PIECE_BYTES = 3000
SHARDED = ("zero2", "shard_grad_op", "fsdp")
HYBRID = Mesh(replicate=2, shard=2)
CASE = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=3)
each_strategy = pytest.mark.parametrize("strategy", SHARDED)


@each_strategy
@pytest.mark.parametrize("model", ["gpt", "awkward", *whole("llama", "vit", "resnet")])
def test_two_ranks_with_pieces_are_bit_equal_to_one_process(model: str, strategy: str) -> None:
    """Also where most pieces hold nothing of a small parameter, and some nothing of a small buffer."""
    case = Case(make=MODELS.get(model, make_awkward), optimizer=adamw)
    if model == "awkward":
        case = replace(case, loss=squares)
    for piece_bytes in (PIECE_BYTES, 300):
        plan = Plan(strategy=strategy, piece_bytes=piece_bytes)
        assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


def trained(rank: int, plan: Plan, max_norm: float | None) -> Result:
    return on_ranks(rank, replace(CASE, max_norm=max_norm), plan, True)


WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "reduced in bf16": {"precision": "bf16", "reduce_dtype": "bf16"},
    "modules in fp32": {"precision": "bf16", "keep_fp32": ["*norm*"], "reduce_dtype": "bf16"},
    "two in flight": {"reduces_in_flight": 2},
    "any order": {"dynamic": True},
    "recomputed": {"recompute": "full"},
    "updated in backward": {"update": "backward"},
    "states in host memory": {"offload_states": True},
    "updated by the CPU": {"offload_states": True, "offload_update": "host"},
    "some replicated": {"overrides": {"blocks.0": "ddp", "(root)": "zero2"}},
    "the ring": {"collectives": "ring"},
}


@pytest.mark.parametrize("way", WAYS)
def test_pieces_give_the_bits_of_the_whole(way: str) -> None:
    for strategy in ("zero2", "fsdp"):
        plan = Plan(strategy=strategy, piece_bytes=PIECE_BYTES, **WAYS[way])
        pieces, units = (
            run_ranks(trained, num_ranks=2, args=(each, None)) for each in (plan, replace(plan, piece_bytes=0))
        )
        for found, expected in zip(pieces, units, strict=True):
            assert_same(found, expected)


def assert_same(found: Result, expected: Result) -> None:
    assert found.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["free", "clipped"])
@pytest.mark.parametrize(
    "settings",
    [{"mesh": HYBRID}, {"mesh": HYBRID, "reduce_dtype": "bf16", "reduces_in_flight": 2}, {}],
    ids=["hybrid", "hybrid, in bf16", "four slices"],
)
def test_four_ranks_with_pieces_have_the_bits_of_the_whole(settings: dict[str, Any], max_norm: float | None) -> None:
    for strategy in SHARDED:
        plan = Plan(strategy=strategy, piece_bytes=PIECE_BYTES, **settings)
        pieces, units = (
            run_ranks(trained, num_ranks=4, args=(each, max_norm)) for each in (plan, replace(plan, piece_bytes=0))
        )
        for found, expected in zip(pieces, units, strict=True):
            assert_same(found, expected)


@each_strategy
@pytest.mark.parametrize("reduced", [False, True], ids=["kept", "reduced"])
def test_passes_of_an_accumulation_add_up_in_pieces(strategy: str, reduced: bool) -> None:
    plan = Plan(strategy=strategy, accumulate_reduced=reduced, piece_bytes=PIECE_BYTES)
    pieces, units = (run_ranks(accumulated, num_ranks=2, args=(each,)) for each in (plan, replace(plan, piece_bytes=0)))
    for found, expected in zip(pieces, units, strict=True):
        assert_same(found, expected)


def replanned(rank: int, plans: list[Plan]) -> Result:
    """A plan for each pass of an accumulation."""
    torch.manual_seed(1)
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plans[0])
    losses = []
    for step in range(2):
        for number, (given, plan) in enumerate(zip(micro_batches(batch, step=step, rank=rank), plans, strict=True)):
            shardwise.replan(model, plan)
            with shardwise.accumulate(model, enabled=number + 1 < len(plans)):
                loss = cross_entropy(model, given)
                loss.backward()
            losses.append([loss.item()])
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses=losses, weights=dict(shardwise.full_state_dict(model)["model"]))


def test_what_pieces_hold_moves_to_another_plan_and_back() -> None:
    plans = [Plan(strategy="fsdp", piece_bytes=size) for size in (PIECE_BYTES, 0, 1000)]
    moved, stayed = (run_ranks(replanned, num_ranks=2, args=(each,)) for each in (plans, [Plan()] * 3))
    for found, expected in zip(moved, stayed, strict=True):
        assert_same(found, expected)


def broken(rank: int, breaks: bool) -> Result:
    """The weights after a few steps, before one of which a backward breaks in the first block, and is done again."""
    torch.manual_seed(1)
    model, batch = MODELS["gpt"]()
    plan = Plan(strategy="fsdp", piece_bytes=PIECE_BYTES)
    collectives = make_collectives(late=True, rank=rank)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan, collectives=collectives)
    for step in range(3):
        if breaks and step == 1:
            break_backward(model, batch(step, rank))
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses=[], weights=model.state_dict())


def test_a_backward_that_breaks_between_pieces_leaves_nothing_behind() -> None:
    pairs = (run_ranks(broken, num_ranks=2, args=(breaks,)) for breaks in (True, False))
    for found, expected in zip(*pairs, strict=True):
        assert_same(found, expected)


@each_strategy
def test_the_tape_with_pieces_is_the_program(strategy: str) -> None:
    plans = [
        Plan(strategy=strategy, piece_bytes=PIECE_BYTES, prefetch=prefetch, reduces_in_flight=reduces)
        for prefetch, reduces in [(0, 1), (1, 2), (3, 1)]
    ]
    assert min(run_ranks(compare_with_program, num_ranks=2, args=("gpt", plans))) > 300


def test_the_tape_of_a_hybrid_mesh_with_pieces_is_the_program() -> None:
    plans = [Plan(strategy=strategy, mesh=HYBRID, piece_bytes=PIECE_BYTES) for strategy in ("zero2", "fsdp")]
    assert min(run_ranks(compare_with_program, num_ranks=4, args=("gpt", plans))) > 300


def reduced_elements(rank: int, plan: Plan) -> tuple[list[int], list[int]]:
    """(The sizes of what is reduced in a step; elements that all units' gradients have, with padding)."""
    model, batch = MODELS["gpt"]()
    late = LateCollectives(BackendCollectives(), seed=rank)
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan, collectives=late)
    for step in range(2):
        late.issued.clear()
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).core.wait_gathers()
    sizes = [size for name, size, _ in late.issued if name == "reduce_scatter"]
    return sizes, [flat.layout.num_elements for flat in engine_of(model).core.flats]


@each_strategy
def test_no_buffer_that_is_reduced_is_larger_than_a_piece(strategy: str) -> None:
    for sizes, units in run_ranks(reduced_elements, num_ranks=2, args=(Plan(strategy=strategy, piece_bytes=8000),)):
        assert sum(sizes) == sum(units)
        # Pieces begin at multiples of 32 elements of each of the two slices.
        assert max(sizes) <= 8000 // 4 + 2 * 32 < max(units)


def held(rank: int, piece_bytes: int) -> dict[str, Tensor]:
    """What one pass of an accumulation has left, by parameter."""
    torch.manual_seed(2)
    model, batch = MODELS["gpt"]()
    shardwise.prepare(model, adamw(model.parameters()), Plan(strategy="zero2", piece_bytes=piece_bytes))
    with shardwise.accumulate(model):
        cross_entropy(model, batch(0, rank)).backward()
    core = engine_of(model).core
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[key]: value.clone() for key, value in core.executor.take_held().items()}


def test_sums_of_a_rank_are_whole_again_where_they_are_asked_for() -> None:
    for in_pieces, at_once in zip(*(run_ranks(held, num_ranks=2, args=(size,)) for size in (500, 0)), strict=True):
        assert in_pieces.keys() == at_once.keys()
        for name, value in at_once.items():
            assert torch.equal(in_pieces[name], value), name
