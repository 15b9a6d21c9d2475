"""Frozen parameters cost nothing: nothing of them is reduced or gathered after an update, and training stays the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import NUM_TRAINED, make_adapted, make_half, one_step
from cases import adamw, sgd, squares
from ranks import run_ranks
from torch import Tensor, nn
from training import Case, assert_close, assert_equal, line, make_collectives, on_ranks, one_process
from whole import strategies, whole

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.engine.core.step_events import TapeEntry
from shardwise.engine.engine import engine_of, tape
from shardwise.engine.prepared.inventory import held_bytes
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, placement_of
from shardwise.planner.memory.peak import job_of
from shardwise.planner.traffic import sent_bytes
from shardwise.program import Kind, Operation, build

PLANS = [Plan(strategy=strategy, units="class:AdaptedBlock") for strategy in STRATEGIES]


@pytest.mark.parametrize("strategy", strategies("zero1", "zero2", "fsdp"))
def test_adapters_on_a_frozen_base_train_bit_equal_to_one_process(strategy: str) -> None:
    plan = Plan(strategy=strategy, units="class:AdaptedBlock")
    case = Case(make=make_adapted, optimizer=adamw, num_steps=4)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


@pytest.mark.parametrize(("strategy", "of_frozen"), [("fsdp", "ddp"), ("zero2", "shard_grad_op")])
def test_and_where_a_frozen_unit_has_a_placement_of_its_own(strategy: str, of_frozen: str) -> None:
    case = Case(make=make_adapted, optimizer=adamw, num_steps=4)
    plan = Plan(strategy=strategy, units="class:AdaptedBlock", overrides={"blocks.1": of_frozen})
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_and_agree_with_it_where_gradients_are_clipped(strategy: str) -> None:
    case = Case(make=make_adapted, optimizer=sgd, num_steps=4, max_norm=0.1, double=True)
    plan = Plan(strategy=strategy, units="class:AdaptedBlock", precision="native")
    results = run_ranks(on_ranks, num_ranks=2, args=(case, plan, True))
    assert_close(results, one_process(case, num_ranks=2), tolerance=1e-10)


def prepared(plan: Plan, *, rank: int, late: bool = True, thawed: bool = False) -> Any:
    torch.manual_seed(1234)
    model, batch = make_adapted()
    optimizer = adamw(model.parameters())
    if thawed:
        model.requires_grad_(True)
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=late, rank=rank))
    return model, optimizer, batch


def alone() -> Any:
    torch.manual_seed(1234)
    model, batch = make_adapted()
    return model, adamw(model.parameters()), batch


def taken(model: nn.Module, optimizer: Any, recorded: Any, batch: Any) -> tuple[list[TapeEntry], list[Operation]]:
    """A step's operations, and those of its program."""
    recorded.take()
    cross_entropy(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    engine = engine_of(model)
    return recorded.take(), list(build(engine.core.followed.spec, plan=engine.core.followed.plan).operations())


def bytes_of(entries: Any, kind: Kind) -> int:
    return sum(entry.num_bytes for entry in entries if entry.kind is kind)


def traffic(rank: int, plans: list[Plan]) -> None:
    """Bytes that are reduced, and gathered after the update: on the tape, in the program and in the planner."""
    for plan in plans:
        model, optimizer, batch = prepared(plan, rank=rank)
        with tape(model) as recorded:
            for step in range(2):
                entries, program = taken(model, optimizer, recorded, batch(step, rank))
        assert bytes_of(entries, Kind.REDUCE) == bytes_of(program, Kind.REDUCE) == 4 * NUM_TRAINED, plan
        assert [str(entry) for entry in entries] == [str(operation) for operation in program]
        placement = placement_of(plan.strategy)
        updated = [str(entry) for entry in entries].index("update (root)")
        gathered = [bytes_of(of[updated:], Kind.GATHER) for of in (entries, program)]
        regathers = placement.params is not SHARDED and placement.optim is SHARDED
        assert gathered == [4 * NUM_TRAINED if regathers else 0] * 2, plan
        assert bytes_of(entries, Kind.GATHER) == bytes_of(program, Kind.GATHER)
        spec = engine_of(model).core.followed.spec
        job = job_of(spec, plan=plan, num_ranks=2, optimizer="adamw-loop", device="cpu")
        reduced = bytes_of(entries, Kind.REDUCE) * (1 if placement.grads is SHARDED else 2)
        assert sent_bytes(job) == (bytes_of(entries, Kind.GATHER) + reduced) / 2


def test_engine_program_and_planner_reduce_the_bytes_that_are_trained_and_no_more() -> None:
    run_ranks(traffic, num_ranks=2, args=(PLANS,))


# A base in bf16


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_adapters_in_fp32_on_a_base_in_bf16_train_bit_equal_in_native_precision(strategy: str) -> None:
    case = Case(make=make_half, optimizer=adamw, num_steps=3, loss=squares)
    plan = Plan(strategy=strategy, units="class:HalfBase", precision="native")
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


def half_bytes(rank: int, strategy: str, precision: str) -> int:
    """Of parameters and masters."""
    model, _ = make_half()
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:HalfBase", precision=precision))
    held = held_bytes(model, optimizer)
    return held["params"] + held["optim"]


def test_of_a_frozen_base_in_bf16_nothing_is_held_in_fp32() -> None:
    numel = 2 * 64 * 64
    # Of the base and of the adapters; under bf16 adapters compute in bf16 and have masters.
    expected = {("ddp", "native"): 2 + 4, ("fsdp", "native"): 3, ("ddp", "bf16"): 2 + (2 + 4), ("fsdp", "bf16"): 3}
    for (strategy, precision), size in expected.items():
        held = run_ranks(half_bytes, num_ranks=2, args=(strategy, precision))
        assert held == [size * numel] * 2, (strategy, precision)


def thawed_half(rank: int, plan: Plan, given: torch.dtype) -> dict[str, Tensor]:
    """Two steps, then two in which a part of the base is trained too; whether it was given in bf16 or fp32."""
    torch.manual_seed(7)
    model, batch = make_half()
    for module in model:
        module.base.to(given)
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    for step in range(4):
        if step == 2:
            model[1].base.requires_grad_(True)
            if given is torch.bfloat16:
                said = line(lambda: model(batch(step, rank)[0]))  # noqa: B023
                assert said.startswith("1.base.weight is trained now and has no fp32 master"), said
                assert "shardwise.extend(model)" in said
                shardwise.extend(model)
        squares(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.float() for name, value in shardwise.full_state_dict(model, optimizer)["model"].items()}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", *whole("ddp", "zero2")])
def test_a_part_of_it_that_is_thawed_gets_masters_and_trains_as_if_it_had_had_them(strategy: str) -> None:
    plan = Plan(strategy=strategy, units="class:HalfBase", precision="bf16")
    expected = run_ranks(thawed_half, num_ranks=2, args=(plan, torch.float32))[0]
    for weights in run_ranks(thawed_half, num_ranks=2, args=(plan, torch.bfloat16)):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


# Several passes


PASSES = 3


def accumulated(rank: int, plan: Plan) -> dict[str, Tensor]:
    model, optimizer, batch = prepared(plan, rank=rank)
    for step in range(2):
        for number in range(PASSES):
            with shardwise.accumulate(model, enabled=number + 1 < PASSES):
                cross_entropy(model, batch(PASSES * step + number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_gradients_of_several_passes_add_up_under_every_strategy_alike() -> None:
    expected = run_ranks(accumulated, num_ranks=2, args=(PLANS[0],))[0]
    for plan in PLANS[1:]:
        for weights in run_ranks(accumulated, num_ranks=2, args=(plan,)):
            assert all(torch.equal(weights[name], expected[name]) for name in expected), plan


# Frozen and thawed later


PHASES: list[tuple[str, ...]] = [
    ("down", "up", "norm"),
    ("blocks.1", "up"),
    ("base",),
    ("down", "blocks.0.norm"),
    ("",),
]
"""What is trained, by a part of its name: adapters, parts of the base, the base alone, both in part, all."""


def begin(model: nn.Module, phase: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in phase))


def phases(rank: int, plan: Plan | None) -> dict[str, Tensor]:
    """Two steps each; without a plan, both ranks' batches in one process. On the tape: what the program says."""
    model, optimizer, batch = prepared(plan, rank=rank) if plan is not None else alone()
    for number, phase in enumerate(PHASES):
        begin(model, phase)
        if plan is None:
            for step in (2 * number, 2 * number + 1):
                one_step(model, [batch(step, 0), batch(step, 1)])
                optimizer.step()
                optimizer.zero_grad()
            continue
        with tape(model) as recorded:
            for step in (2 * number, 2 * number + 1):
                entries, program = taken(model, optimizer, recorded, batch(step, rank))
        sent, counted = ([one for one in of if one.kind in (Kind.GATHER, Kind.REDUCE)] for of in (entries, program))
        assert [str(entry) for entry in sent] == [str(operation) for operation in counted], (plan, phase)
        for entry, operation in zip(sent, counted, strict=True):
            # And padding.
            assert operation.num_bytes <= entry.num_bytes < operation.num_bytes + 2000, (plan, phase, str(entry))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_what_is_thawed_or_frozen_later_trains_bit_equal_to_one_process_and_is_what_the_program_counts() -> None:
    (expected,) = run_ranks(phases, num_ranks=1, args=(None,))
    for plan in PLANS:
        for weights in run_ranks(phases, num_ranks=2, args=(plan,)):
            assert all(torch.equal(weights[name], expected[name]) for name in expected), plan


def frozen_with_gradients(rank: int, strategy: str) -> str:
    """All of a buffer is frozen between two backwards, of which the first has left gradients."""
    model, optimizer, batch = prepared(Plan(strategy=strategy, units="class:AdaptedBlock"), rank=rank)
    cross_entropy(model, batch(0, rank)).backward()
    model.blocks[0].linear.up.requires_grad_(False)
    cross_entropy(model, batch(1, rank)).backward()
    return line(optimizer.step)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_an_update_of_a_frozen_buffer_that_no_rank_would_gather_is_refused(strategy: str) -> None:
    for said in run_ranks(frozen_with_gradients, num_ranks=2, args=(strategy,)):
        assert said.startswith("blocks.0.linear.up.weight is frozen and still has a gradient")
        assert "zero_grad() before" in said


def frozen_between_backwards(rank: int, plan: Plan | None, *frozen: str) -> dict[str, Tensor]:
    """What is frozen after the first of two backwards keeps its gradient, and is stepped by it."""
    model, optimizer, batch = prepared(plan, rank=rank) if plan is not None else alone()
    cross_entropy(model, batch(0, 0)).backward()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    cross_entropy(model, batch(1, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_what_is_frozen_with_a_gradient_is_stepped_by_it_as_in_one_process() -> None:
    # Some of what shares its buffer, and all of it.
    for frozen in (("norm.weight",), ("blocks.0.linear.up.weight",)):
        (expected,) = run_ranks(frozen_between_backwards, num_ranks=1, args=(None, *frozen))
        for plan in PLANS:
            if frozen[0] != "norm.weight" and plan.strategy in ("zero1", "zero2"):
                continue
            for weights in run_ranks(frozen_between_backwards, num_ranks=2, args=(plan, *frozen)):
                assert all(torch.equal(weights[name], expected[name]) for name in expected), (plan, frozen)


def thawed_inside(rank: int, strategy: str) -> str:
    model, _, batch = prepared(Plan(strategy=strategy, units="class:AdaptedBlock"), rank=rank, late=False)
    model.blocks[1].register_forward_pre_hook(lambda module, _: module.linear.requires_grad_(True) and None)
    return line(lambda: cross_entropy(model, batch(0, rank)).backward())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_parameter_that_is_thawed_inside_a_forward_is_named(strategy: str) -> None:
    for said in run_ranks(thawed_inside, num_ranks=2, args=(strategy,)):
        assert said.startswith("blocks.1.linear.weight was frozen when the model was called")


# Checkpoints


def carried_over(rank: int, folder: str, plans: list[tuple[Plan, bool]]) -> None:
    """Each checkpoint goes into the next plan's model, whose buffers may be cut otherwise: nothing was frozen there."""
    checkpoints = Checkpoints(folder)
    model, optimizer, batch = prepared(plans[0][0], rank=rank)
    for number, (plan, thawed) in enumerate(plans[1:]):
        cross_entropy(model, batch(number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(model, optimizer, step=number)
        before = shardwise.full_state_dict(model, optimizer)
        model, optimizer, batch = prepared(plan, rank=rank, thawed=thawed)
        checkpoints.load(checkpoints.latest(), model, optimizer)
        begin(model, PHASES[0])
        after = shardwise.full_state_dict(model, optimizer)
        assert before["model"].keys() == after["model"].keys()
        assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
        for name, state in before["optimizer"]["state"].items():
            assert all(torch.equal(state[key], after["optimizer"]["state"][name][key]) for key in state)
    checkpoints.close()


def test_checkpoints_go_between_plans_and_between_buffers_that_are_cut_otherwise(tmp_path: Path) -> None:
    by_name = dict(zip(STRATEGIES, PLANS, strict=True))
    order = [("fsdp", False), ("ddp", True), ("zero2", False), ("zero1", True), ("shard_grad_op", False)]
    plans = [(by_name[name], thawed) for name, thawed in order]
    run_ranks(carried_over, num_ranks=2, args=(str(tmp_path), plans))


def carried_half(rank: int, folder: str) -> None:
    """Between a base that is held in bf16 and one that is held in fp32, both ways."""
    checkpoints = Checkpoints(folder)
    weights = {}
    for number, (strategy, given) in enumerate(
        [("fsdp", torch.bfloat16), ("ddp", torch.float32), ("zero2", torch.bfloat16)]
    ):
        torch.manual_seed(number)
        model, batch = make_half()
        for module in model:
            module.base.to(given)
        optimizer = adamw(model.parameters())
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:HalfBase", precision="bf16"))
        if number:
            checkpoints.load(checkpoints.latest(), model, optimizer)
            found = shardwise.full_state_dict(model, optimizer)["model"]
            assert all(torch.equal(found[name].float(), weights[name].float()) for name in weights)
        squares(model, batch(number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(model, optimizer, step=number)
        weights = shardwise.full_state_dict(model, optimizer)["model"]
        assert weights["0.base.weight"].dtype == given
    checkpoints.close()


def test_checkpoints_go_between_a_base_in_bf16_and_one_in_fp32(tmp_path: Path) -> None:
    run_ranks(carried_half, num_ranks=2, args=(str(tmp_path),))
