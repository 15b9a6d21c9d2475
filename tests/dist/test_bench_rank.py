"""A rank of a bench: every engine does the same training, and what is measured of it is what it did."""

import json
import time
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ranks import preload, run_ranks
from test_bench import check_silent
from train_tasks import reference
from whole import strategies, whole

from shardwise.measure.bench.contestants import ENGINES, plan_for
from shardwise.measure.bench.run_files import ASKED, BenchRun, Found
from shardwise.measure.bench.worker import run_rank
from shardwise.measure.profile.compare import predict
from shardwise.measure.profile.rehearsal import Rehearsal
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, Mesh, placement_of
from shardwise.planner.memory.peak import job_of
from shardwise.planner.traffic import sent_bytes
from shardwise.program import build
from shardwise.training.config.config import TrainConfig
from shardwise.training.launch.launch import launch

preload("accelerate", "lightning.pytorch")

MODEL, SEQ, BATCH, NUM_RANKS = "gpt-tiny", 32, 2, 2
# Of float32: half the distance from 1 to the next number.
ROUNDOFF = 2**-24


def config(*, small: bool = False, **plan: Any) -> TrainConfig:
    task = {"model": reference("gpt")} if small else {"model": MODEL, "dataset": "stdlib", "seq": SEQ}
    return TrainConfig.from_dict(
        {
            "task": task,
            "plan": {"micro_batch": BATCH, **plan},
            "train": {"steps": 4},
            "run": {"folder": "runs/bench", "device": "cpu"},
        }
    )


def asked(engine: str, strategy: str, **options: Any) -> BenchRun:
    told = config(**options)
    told = replace(told, plan=plan_for(engine, strategy, told.plan))
    return BenchRun(config=told, engine=engine, warm_up=3, blocks=2, block_steps=1)


def body(rank: int, run: BenchRun) -> Found:
    return run_rank(run)


@cache
def found(engine: str, strategy: str, **options: Any) -> list[Found]:
    run = asked(engine, strategy, **options)
    return run_ranks(body, num_ranks=NUM_RANKS, args=(run,), timeout_seconds=110)


CASES = [
    *(("shardwise", strategy) for strategy in ("ddp", "fsdp")),
    ("torch", "ddp"),
    ("torch", "fsdp"),
    ("accelerate", "ddp"),
    ("lightning", "fsdp"),
    *whole(("shardwise", "zero1"), ("shardwise", "zero2"), ("shardwise", "shard_grad_op"), ("lightning", "ddp")),
    *whole(("torch", "shard_grad_op"), ("lightning", "shard_grad_op")),
]


def assert_same_training(one: Found, other: Found, *, exactly: bool = False) -> None:
    """To some roundoffs: torch adds the whole norm up in float32, we in float64, and all are clipped by theirs."""
    clipped, whole_norm = (0.0, 0.0) if exactly else (16 * ROUNDOFF, 64 * ROUNDOFF)
    assert len(one.losses) == 5
    assert one.losses == pytest.approx(other.losses, rel=clipped, abs=0)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=whole_norm, abs=0)
    assert one.param_norms == pytest.approx(other.param_norms, rel=clipped, abs=0)


@pytest.mark.parametrize(("engine", "strategy"), CASES)
def test_every_engine_does_the_same_training(engine: str, strategy: str) -> None:
    needed = ENGINES[engine].package
    if needed and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    ranks = found(engine, strategy)
    assert_same_training(ranks[0], found("shardwise", "ddp")[0], exactly=engine == "shardwise")
    for rank, other in enumerate(ranks):
        assert other.rank == rank
        # What is told by all is told alike.
        assert other.losses == ranks[0].losses
        assert other.param_norms == ranks[0].param_norms
        assert other.block_seconds == ranks[0].block_seconds
    assert len(ranks[0].param_norms) == 52
    assert ranks[0].dtypes == dict.fromkeys(("compute", "master", "grads", "optim"), ("float32",))
    assert len(ranks[0].block_seconds) == 2
    assert (ranks[0].step_samples, ranks[0].step_tokens) == (NUM_RANKS * BATCH, NUM_RANKS * BATCH * SEQ)


@cache
def source() -> Model:
    return Model(MODEL, seq=SEQ, kernels="cpu")


def planned(strategy: str) -> Plan:
    return Plan(strategy=strategy, micro_batch=BATCH, mesh=Mesh(shard=NUM_RANKS))


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_the_peak_is_the_predicted_one(strategy: str) -> None:
    job = Rehearsal(model=MODEL, seq=SEQ, plan=Plan(strategy=strategy), num_ranks=NUM_RANKS, batch=BATCH)
    predicted = predict(job, spec_for=source().spec_for)
    for rank in found("shardwise", strategy):
        assert rank.ledger is not None
        assert rank.allocated_bytes == rank.ledger.peak.total_bytes
        assert rank.allocated_bytes == pytest.approx(predicted.memory.allocated_bytes, rel=0.02)
        assert rank.ledger.peak.at == predicted.memory.peak_at
        assert [entry.at for entry in rank.ledger.entries] == [entry.at for entry in predicted.entries]


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_the_tape_is_the_program_each_operation_in_its_row(strategy: str) -> None:
    first, second = found("shardwise", strategy)
    assert first.ledger is not None
    program = build(source().spec_for(planned(strategy)), plan=planned(strategy))
    issued = [(first.ledger.entries[one.row].at, one.kind, one.subject) for one in first.tape]
    # After the update nothing is marked any more: what is left of the step is in its row.
    assert issued == [
        (f"{row.trigger.value} {row.unit}", operation.kind.value, operation.subject)
        for row in program.rows
        for operation in row.operations
    ]
    assert all(0 <= one.seconds <= other.seconds for one, other in pairwise(first.tape))
    assert first.buckets == {bucket.name: bucket.units for bucket in program.buckets}
    assert second.tape == ()
    # A step of the usual length, which nobody recorded.
    assert first.tape_seconds is not None
    assert first.tape[-1].seconds <= first.tape_seconds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_memory_after_each_operation_is_what_the_operation_left(strategy: str) -> None:
    first, second = found("shardwise", strategy)
    for rank in (first, second):
        assert rank.ledger is not None
        after = rank.ledger.operations
        assert [entry.at for entry in after] == [f"{one.kind} {one.subject}" for one in first.tape]
        assert max(entry.total_bytes for entry in after) <= rank.ledger.peak.total_bytes
        freed = 0
        for at, one in enumerate(first.tape):
            gathered = after[at].num_bytes["gathered"]
            before = after[at - 1].num_bytes["gathered"] if at else rank.ledger.at_rest.num_bytes["gathered"]
            if one.kind == "gather":
                assert gathered > before
            elif one.kind == "free":
                assert before - gathered == one.num_bytes
                freed += 1
        assert (freed > 0) == (strategy == "fsdp")


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_what_our_engine_sends_is_what_its_tape_says(strategy: str) -> None:
    rank = found("shardwise", strategy)[0]
    once = (NUM_RANKS - 1) / NUM_RANKS
    gathered = sum(one.num_bytes for one in rank.tape if one.kind == "gather")
    reduced = sum(one.num_bytes for one in rank.tape if one.kind == "reduce")
    flags = sum(one.num_bytes for one in rank.tape if one.kind == "reduce flags")
    # Clipping sums one float64 over slices. On a CPU what would be reduce-scattered is all-reduced (comm/groups/collectives.py).
    norm = 8 if placement_of(strategy).optim is SHARDED else 0
    assert rank.sent_bytes == once * (gathered + 2 * (reduced + flags + norm))
    scattered = reduced if placement_of(strategy).grads is SHARDED else 0
    plan = planned(strategy)
    spec = source().spec_for(plan)
    planned_bytes = sent_bytes(job_of(spec, plan=plan, num_ranks=NUM_RANKS, optimizer="adamw-loop", device="cpu"))
    # Padding, flags and the norm are not planned.
    assert rank.sent_bytes - once * scattered == pytest.approx(planned_bytes, rel=0.01)
    assert rank.sent_bytes - once * scattered >= planned_bytes


@pytest.mark.parametrize("engine", ["torch", "lightning", *whole("accelerate")])
def test_ddp_sends_each_gradient_as_a_ring_would(engine: str) -> None:
    ranks = found(engine, "ddp")
    gradient_bytes = 4 * sum(unit.num_trained for unit in ranks[0].units)
    assert [rank.sent_bytes for rank in ranks] == [2 * gradient_bytes * (NUM_RANKS - 1) // NUM_RANKS] * NUM_RANKS
    assert ranks[0].calls.keys() == {"all_reduce"}


def test_fully_shard_gathers_and_scatters() -> None:
    (rank, _) = found("torch", "fsdp")
    num_units = len(rank.units)
    assert rank.calls["reduce_scatter"] == num_units
    # All but the root are gathered for backward again.
    assert rank.calls["all_gather"] == 2 * num_units - 1
    assert rank.tape == ()
    assert rank.ledger is not None
    assert {entry.at for entry in rank.ledger.entries} >= {"before forward blocks.0", "before backward blocks.0"}


@pytest.mark.parametrize(
    ("engine", "strategy", "plan"),
    whole(
        ("torch", "fsdp", {"accumulate": 2}),
        ("accelerate", "ddp", {"accumulate": 2}),
        ("lightning", "ddp", {"accumulate": 2}),
        ("lightning", "fsdp", {"accumulate": 2}),
        ("accelerate", "ddp", {"recompute": "full"}),
        ("lightning", "fsdp", {"recompute": "full"}),
        ("accelerate", "ddp", {"compile": "aot_eager"}),
    ),
)
def test_passes_that_accumulate_and_units_that_recompute_or_are_compiled_are_the_same_too(
    engine: str, strategy: str, plan: dict[str, Any]
) -> None:
    assert_same_training(found(engine, strategy, **plan)[0], found("shardwise", "ddp", **plan)[0])


@pytest.mark.parametrize(
    ("engine", "strategy"), [("torch", "fsdp"), *whole(("torch", "ddp"), ("lightning", "fsdp"), ("accelerate", "ddp"))]
)
def test_bf16_is_seen_in_every_engine(engine: str, strategy: str) -> None:
    """On a small model: many CPUs are slow in it. On them torch's attention with dropout multiplies in float32."""
    in_fp32 = dict.fromkeys(("master", "grads", "optim"), ("float32",))
    for by in (engine, "shardwise"):
        (rank, _) = found(by, strategy, precision="bf16", small=True)
        assert rank.dtypes == {"compute": ("bfloat16", "float32"), **in_fp32}, by


def launched(run: BenchRun, folder: Path, *, num_ranks: int) -> int:
    (folder / ASKED).write_text(json.dumps(run.to_data()))
    program = "shardwise.measure.bench.worker"
    return launch((str(folder),), num_ranks=num_ranks, max_restarts=0, folder=folder, program=program)


@pytest.mark.parametrize(("engine", "strategy"), whole(("torch", "fsdp"), ("lightning", "ddp")))
def test_a_silent_run_of_another_engine_gives_times_and_nothing_else(
    engine: str, strategy: str, tmp_path: Path
) -> None:
    before = time.time()
    run = replace(asked(engine, strategy), silent=True, started=before)
    assert launched(run, tmp_path, num_ranks=NUM_RANKS) == 0
    check_silent(tmp_path, limit_seconds=time.time() - before)


def test_a_mistake_of_a_rank_is_the_launchers_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = config(mesh={"replicate": 2, "shard": 2})
    assert launched(BenchRun(config=told, engine="shardwise"), tmp_path, num_ranks=1) == 2
    assert "mesh 2×2 is 4 ranks, but the job has 1" in capfd.readouterr().err
    assert not list(tmp_path.glob("rank-*.json"))
