"""`shardwise.replan`: another plan between two steps; training goes on bit for bit as if it had been resumed under it."""

import warnings
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import make_adapted
from cases import MODELS, OPTIMIZERS, adamw, make_awkward, squares
from live import LiveTensors, Silent
from ranks import run_ranks
from torch import Tensor, nn
from training import line, make_collectives
from whole import whole

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.engine.engine import engine_of, tape
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program import Kind, build

CASES = {
    "gpt": (MODELS["gpt"], cross_entropy),
    "adapted": (make_adapted, cross_entropy),
    "awkward": (make_awkward, squares),
    "resnet": (MODELS["resnet"], cross_entropy),
}


def walk(plans: list[Plan]) -> list[Plan]:
    """A way that takes each ordered pair of plans once."""
    left = {index: [other for other in range(len(plans)) if other != index] for index in range(len(plans))}
    way, path = [], [0]
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            way.append(path.pop())
    return [plans[index] for index in reversed(way)]


def strategies(**options: Any) -> list[Plan]:
    return [Plan(strategy=strategy, **options) for strategy in STRATEGIES]


class Run:
    """A training of one of the cases."""

    def __init__(self, name: str, optimizer: str, plan: Plan, *, rank: int, late: bool = True) -> None:
        torch.manual_seed(1234)
        make, self.loss = CASES[name]
        self.model, self.batch = make()
        self.rank = rank
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        shardwise.prepare(self.model, self.optimizer, plan, collectives=make_collectives(late=late, rank=rank))
        self.scaler = shardwise.GradScaler("cpu", enabled=plan.precision == "fp16", init_scale=2.0**10)
        self.step = 0

    def backward(self, number: int = 0) -> float:
        loss = self.loss(self.model, self.batch(10 * self.step + number, self.rank))
        self.scaler.scale(loss).backward()
        return loss.item()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Less that of a parameter without elements, which only a rank that holds whole parameters steps."""
        state = shardwise.full_state_dict(self.model, self.optimizer)
        state["optimizer"]["state"].pop("empty", None)
        return state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ in any bit, however deep."""
    if isinstance(one, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict | list | tuple):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        if set(keys) != set(other.keys() if isinstance(other, dict) else range(len(other))):
            return [f"{path}: {keys}"]
        return [found for key, value in items for found in differences(value, other[key], f"{path}/{key}")]
    return [] if one == other else [f"{path}: {one} | {other}"]


def walked(rank: int, name: str, optimizer: str, plans: list[Plan]) -> tuple[list[float], dict[str, Any]]:
    """A step under each plan of a way."""
    run = Run(name, optimizer, plans[0], rank=rank)
    losses = []
    for plan in plans:
        shardwise.replan(run.model, plan)
        assert engine_of(run.model).core.followed.plan == plan
        losses.append(run.backward())
        run.update()
    return losses, run.state()


@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("awkward", "groups", {}),
        ("gpt", "adamw fused", {}),
        *whole(
            ("gpt", "adamw fused", {"precision": "bf16"}),
            ("gpt", "sgd", {}),
            ("adapted", "groups", {}),
            ("adapted", "adam foreach", {"precision": "bf16"}),
            ("gpt", "adamw plain", {"precision": "fp16"}),
            ("resnet", "sgd", {}),
            ("awkward", "rmsprop", {"precision": "native"}),
            ("gpt", "adamw plain", {"recompute": "full", "prefetch": 2}),
        ),
    ],
)
def test_every_pair_of_strategies_trains_as_one_strategy_does(name: str, optimizer: str, options: Any) -> None:
    plans = walk(strategies(**options))
    assert len(set(pairwise(plan.strategy for plan in plans))) == len(list(permutations(STRATEGIES, 2)))
    alone = run_ranks(walked, num_ranks=2, args=(name, optimizer, [plans[0]] * len(plans)))
    for rank, found in enumerate(run_ranks(walked, num_ranks=2, args=(name, optimizer, plans))):
        assert found[0] == alone[rank][0]
        assert differences(found[1], alone[rank][1]) == []


HOST = [
    Plan(),
    Plan(offload_states=("blocks.1", "(root)"), recompute="full"),
    Plan(offload_states=True, offload_update="host"),
    Plan(strategy="zero2", offload_states=True, offload_activations=("blocks.*",)),
    Plan(offload_states=("blocks.0",), update="backward", overrides={"blocks.1": "ddp"}),
]


@pytest.mark.parametrize(("optimizer", "precision"), [("adamw fused", "fp32"), *whole(("sgd", "bf16"))])
def test_units_move_between_device_and_host_in_the_middle_of_a_run(optimizer: str, precision: str) -> None:
    plans = walk([replace(plan, precision=precision) for plan in HOST])
    assert len(plans) > len(HOST) * (len(HOST) - 1)
    alone = run_ranks(walked, num_ranks=2, args=("gpt", optimizer, [plans[0]] * len(plans)))
    for rank, found in enumerate(run_ranks(walked, num_ranks=2, args=("gpt", optimizer, plans))):
        assert found[0] == alone[rank][0]
        assert differences(found[1], alone[rank][1]) == []


def resumed(rank: int, name: str, first: Plan, then: Plan, folder: str | None) -> Any:
    """Two steps under one plan, three under another: through a checkpoint in `folder`, or without one."""
    run = Run(name, "groups", first, rank=rank)
    ema = shardwise.EMA(run.model, 0.75)
    losses = []
    for step in range(5):
        if step == 2 and folder is None:
            shardwise.replan(run.model, then)
        elif step == 2:
            checkpoints = Checkpoints(folder)
            checkpoints.save(run.model, run.optimizer, step=2, progress={"scaler": run.scaler.state_dict()}, ema=ema)
            checkpoints.close()
            run = Run(name, "groups", then, rank=rank)
            run.step = 2
            ema = shardwise.EMA(run.model, 0.75)
            loaded = checkpoints.load(checkpoints.latest(), run.model, run.optimizer, ema=ema)
            run.scaler.load_state_dict(loaded.progress["scaler"])
        losses.append(run.backward())
        shardwise.clip_grad_norm_(run.model, 0.5) if not run.scaler.is_enabled() else None
        run.update()
        ema.update()
    with ema.applied():
        averages = dict(run.model.state_dict())
    return losses, run.state(), averages, run.scaler.state_dict()


MIXED = Plan(strategy="fsdp", overrides={"blocks.1": "ddp", "blocks.2": "zero1"}, recompute="full")
HYBRID = Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=2))
ACROSS = [replace(HYBRID, across=across) for across in ("zero1", "zero2")]


@pytest.mark.parametrize(
    ("num_ranks", "name", "first", "then"),
    [
        (2, "adapted", Plan(strategy="ddp"), MIXED),
        (2, "gpt", MIXED, Plan(strategy="zero2", offload_states=True, precision="fp32")),
        (4, "awkward", ACROSS[0], Plan()),
        (4, "gpt", HYBRID, ACROSS[1]),
        (2, "gpt", Plan(offload_states=("blocks.1",)), Plan(offload_states=("blocks.0", "(root)"), recompute="full")),
        *whole(
            *(
                (2, name, Plan(strategy=first, **options), Plan(strategy=then, **options))
                for name in ("gpt", "resnet")
                for options in ({}, {"precision": "bf16"}, {"precision": "fp16"})
                for first, then in (("ddp", "fsdp"), ("fsdp", "zero1"), ("zero2", "ddp"), ("zero1", "shard_grad_op"))
            ),
            *(
                (4, name, first, then)
                for name in ("gpt", "awkward")
                for first, then in permutations(
                    (HYBRID, *ACROSS, Plan(strategy="ddp"), Plan(strategy="zero2", mesh=HYBRID.mesh), Plan()), 2
                )
            ),
            (2, "gpt", Plan(offload_states=True), Plan(strategy="ddp")),
            (2, "gpt", Plan(offload_activations=True, prefetch=2), Plan(strategy="zero1", bucket_bytes=1)),
            (1, "gpt", Plan(strategy="ddp"), Plan()),
        ),
    ],
)
def test_it_trains_on_as_a_run_that_was_saved_and_resumed_under_the_other_plan(
    num_ranks: int, name: str, first: Plan, then: Plan, tmp_path: Path
) -> None:
    expected = run_ranks(resumed, num_ranks=num_ranks, args=(name, first, then, str(tmp_path)))
    for rank, found in enumerate(run_ranks(resumed, num_ranks=num_ranks, args=(name, first, then, None))):
        assert differences(found, expected[rank]) == []


def in_accumulation(rank: int, plans: list[Plan], sums: bool) -> Any:
    """A plan for each pass of a step. `sums`: passes sum up on each rank; else each is reduced."""
    run = Run("gpt", "groups", plans[0], rank=rank)
    losses = []
    for _ in range(2):
        for number, plan in enumerate(plans):
            shardwise.replan(run.model, plan)
            with shardwise.accumulate(run.model, enabled=sums and number + 1 < len(plans)):
                losses.append(run.backward(number))
        run.update()
    return losses, run.state()


@pytest.mark.parametrize(
    ("sums", "options"),
    [(True, {}), (False, {}), *whole((False, {"precision": "bf16"}), (True, {"precision": "bf16"}))],
)
def test_gradients_that_are_accumulated_move_too(sums: bool, options: dict[str, str]) -> None:
    plans = walk(strategies(**options))[:8]
    alone = run_ranks(in_accumulation, num_ranks=2, args=([plans[0]] * len(plans), sums))
    for rank, found in enumerate(run_ranks(in_accumulation, num_ranks=2, args=(plans, sums))):
        assert differences(found, alone[rank]) == []


def after_a_load(rank: int, plans: list[Plan], folder: str) -> Any:
    """A step under the first plan; loaded under the second one, which is changed to the third between backward and
    update.
    """
    run = Run("gpt", "groups", plans[0], rank=rank)
    run.backward()
    run.update()
    checkpoints = Checkpoints(folder)
    checkpoints.save(run.model, run.optimizer, step=1)
    checkpoints.close()
    run = Run("gpt", "groups", plans[1], rank=rank)
    run.step = 1
    checkpoints.load(checkpoints.latest(), run.model, run.optimizer)
    losses = []
    for _ in range(2):
        losses.append(run.backward())
        shardwise.replan(run.model, plans[2])
        run.update()
    return losses, run.state()


@pytest.mark.parametrize("strategy", ["shard_grad_op", *whole("zero2", "fsdp")])
def test_gradients_move_after_a_checkpoint_was_loaded_under_another_plan(strategy: str, tmp_path: Path) -> None:
    first, then = Plan(strategy="fsdp"), Plan(strategy="ddp")
    middle = Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=1))
    expected = run_ranks(after_a_load, num_ranks=2, args=([then] * 3, str(tmp_path / "ddp")))
    found = run_ranks(after_a_load, num_ranks=2, args=([first, middle, then], str(tmp_path / "all")))
    assert differences(found, expected) == []


def follows_program(rank: int, first: Plan, then: Plan) -> None:
    run = Run("gpt", "groups", first, rank=rank)
    for _ in range(2):
        run.backward()
        run.update()
    shardwise.replan(run.model, then)
    with tape(run.model) as recorded:
        run.backward()
        run.update()
    expected = build(engine_of(run.model).core.followed.spec, plan=then).operations()
    # What an update would have left to be waited for is there already.
    found, program = (
        [str(operation) for operation in operations if operation.kind is not Kind.WAIT_GATHER]
        for operations in (recorded.take(), expected)
    )
    assert found == program


def test_the_first_step_under_the_other_plan_follows_its_program() -> None:
    for first, then in (("ddp", "fsdp"), ("fsdp", "zero1")):
        run_ranks(follows_program, num_ranks=2, args=(Plan(strategy=first), Plan(strategy=then, prefetch=2)))


SHAPE = GPTShape(num_layers=6, width=64, num_heads=4, vocab_size=64, max_seq=8)


def peak(rank: int, first: Plan, then: Plan) -> tuple[int, int, int, int]:
    """Bytes: live before, at the most, and after; and those of the largest unit's parameters."""
    with LiveTensors() as live:
        model = build_model(SHAPE)
        optimizer = adamw(model.parameters(), foreach=False)
        shardwise.prepare(model, optimizer, first, collectives=Silent())
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            cross_entropy(model, (tokens, tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        unit = max(flat.full.num_bytes for flat in engine_of(model).core.flats)
        with live.phase("before"):
            pass
        with live.phase("replan"):
            shardwise.replan(model, then)
    return live.end_bytes("before"), live.peak_bytes("replan"), live.end_bytes("replan"), unit


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "zero1"), *whole(("zero1", "shard_grad_op"))])
def test_a_rank_holds_no_more_than_the_larger_plan_and_one_unit(first: str, then: str) -> None:
    for before, most, after, unit in run_ranks(peak, num_ranks=2, args=(Plan(strategy=first), Plan(strategy=then))):
        # Of the unit that moves: its parameters and two states, as they were and as they will be.
        assert most <= max(before, after) + 4 * unit, (before, most, after, unit)


def refused(rank: int) -> list[str]:
    run = Run("gpt", "groups", Plan(), rank=rank)
    model, lines = run.model, []
    loss = run.loss(model, run.batch(0, rank))
    lines.append(line(lambda: shardwise.replan(model, Plan(strategy="ddp"))))
    loss.backward()
    lines.append(line(lambda: shardwise.replan(model, Plan(precision="bf16"))))
    lines.append(line(lambda: shardwise.replan(model, Plan(strategy="auto"))))
    lines.append(line(lambda: shardwise.replan(model, Plan(mesh=Mesh(shard=3)))))
    lines.append(line(lambda: shardwise.replan(model, Plan(strategy="ddp" if rank else "zero1"))))
    lines.append(line(lambda: shardwise.replan(nn.Linear(2, 2), Plan())))
    with shardwise.whole(model):
        lines.append(line(lambda: shardwise.replan(model, Plan(strategy="ddp"))))
    # Nothing was touched.
    run.update()
    run.backward()
    run.update()
    return lines


def test_what_cannot_be_is_refused_in_one_line_on_every_rank() -> None:
    for lines in run_ranks(refused, num_ranks=2):
        for expected, said in zip(
            (
                "in the middle of a step",
                "precision = 'bf16', but the model was prepared with 'fp32'",
                "the plan is not chosen yet",
                "the job has 2",
                "different plans: strategy = zero1 | strategy = ddp",
                "this Linear has not been through shardwise.prepare",
                "inside `with shardwise.whole",
            ),
            lines,
            strict=True,
        ):
            assert expected in said


def unknown_optimizer(rank: int) -> str:
    model, _ = MODELS["gpt"]()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    shardwise.prepare(model, optimizer, Plan(strategy="ddp"))
    return line(lambda: shardwise.replan(model, Plan(strategy="fsdp")))


def test_an_optimizer_that_cannot_step_slices_is_refused_before_anything_moves() -> None:
    for said in run_ranks(unknown_optimizer, num_ranks=2):
        assert "Adafactor looks at more than an element in its update" in said


def on_one_rank(rank: int) -> str:
    run = Run("gpt", "groups", Plan(), rank=rank)
    engine_of(run.model).core.followed.limit_seconds = 0.3
    return line(lambda: shardwise.replan(run.model, Plan(strategy="ddp"))) if rank == 0 else ""


def test_a_rank_that_calls_it_alone_names_the_others() -> None:
    assert "rank 1 did not come to shardwise.replan" in run_ranks(on_one_rank, num_ranks=2)[0]


def owned_already(rank: int) -> str:
    model, _ = MODELS["gpt"]()
    optimizer = torch.optim.Adafactor(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardwise.prepare(model, optimizer, Plan(strategy="fsdp"))
    return line(lambda: shardwise.replan(model, Plan(strategy="ddp")))


def test_parameters_that_have_owners_are_refused() -> None:
    for said in run_ranks(owned_already, num_ranks=2):
        assert "shardwise.replan with parameters that are OWNED" in said
