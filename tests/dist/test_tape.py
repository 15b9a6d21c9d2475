"""What a run issues is what the program says, operation by operation."""

from collections import Counter
from itertools import product

import pytest
import torch
from cases import MODELS
from late import LateCollectives
from ranks import run_ranks
from whole import whole

from shardwise import accumulate
from shardwise.comm.groups.collectives import BackendCollectives
from shardwise.engine.core.step_events import TapeEntry
from shardwise.engine.engine import engine_of, tape
from shardwise.engines import prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program import Kind, StepProgram, build, build_first_step


def compare_with_program(rank: int, model_name: str, plans: list[Plan]) -> int:
    compared = 0
    for plan in plans:
        model, batch = MODELS[model_name]()
        optimizer = torch.optim.AdamW(model.parameters())
        prepare(model, optimizer, plan)
        with tape(model) as recorded:
            for step in range(3):
                cross_entropy(model, batch(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                entries = recorded.take()
                spec = engine_of(model).core.followed.spec
                program = build(spec, plan=plan)
                if step == 0:
                    _compare_buffers(entries, build_first_step(spec, plan=plan))
                    continue
                expected = list(program.operations())
                assert [str(entry) for entry in entries] == [str(operation) for operation in expected], plan
                for entry, operation in zip(entries, expected, strict=True):
                    assert entry.stream == operation.kind.stream
                    # What is issued is what is counted, and padding.
                    assert operation.num_bytes <= entry.num_bytes or entry.kind is Kind.BROADCAST, (entry, operation)
                compared += len(entries)
    return compared


def _compare_buffers(entries: list[TapeEntry], program: StepProgram) -> None:
    """Of a first step: when buffers come and go."""
    kinds = (Kind.GATHER, Kind.FORWARD, Kind.FREE, Kind.BACKWARD, Kind.TAKE_GRADS, Kind.WAIT_REDUCE, Kind.UPDATE)
    issued, expected = (
        [str(operation) for operation in operations if operation.kind in kinds]
        for operations in (entries, program.operations())
    )
    assert issued == expected


@pytest.mark.parametrize("model", ["gpt", *whole("resnet")])
def test_the_tape_of_every_strategy_and_prefetch_is_the_program(model: str) -> None:
    plans = [
        Plan(strategy=strategy, prefetch=prefetch, reduces_in_flight=reduces, bucket_bytes=4000)
        for strategy, (prefetch, reduces) in product(STRATEGIES, [(0, 1), (1, 2), (3, 1)])
    ]
    assert min(run_ranks(compare_with_program, num_ranks=2, args=(model, plans))) > 500


REPLICAS, HYBRID = Mesh(replicate=4), Mesh(replicate=2, shard=2)
MIXED = {"blocks.0": "ddp", "blocks.1": "fsdp", "(root)": "zero2"}


@pytest.mark.parametrize(
    "ways",
    [[(REPLICAS, {}), (HYBRID, MIXED)], *whole([(REPLICAS, MIXED), (HYBRID, {})])],
    ids=["overrides of a hybrid mesh", "overrides of replicas"],
)
def test_the_tape_on_every_mesh_and_with_overrides_is_the_program(ways: list[tuple[Mesh, dict[str, str]]]) -> None:
    plans = [
        Plan(strategy=strategy, mesh=mesh, overrides=overrides) for strategy in STRATEGIES for mesh, overrides in ways
    ]
    assert min(run_ranks(compare_with_program, num_ranks=4, args=("gpt", plans))) > 500


def test_the_tape_where_states_are_sharded_over_all_ranks_is_the_program() -> None:
    across = [
        Plan(strategy=strategy, across=across, mesh=HYBRID, prefetch=prefetch, **keys)
        for strategy, across, prefetch, keys in (
            ("fsdp", "zero1", 1, {"precision": "bf16", "reduces_in_flight": 2}),
            ("fsdp", "zero2", 0, {}),
            ("shard_grad_op", "zero2", 2, {"overrides": {"blocks.0": "zero1"}}),
        )
    ]
    assert min(run_ranks(compare_with_program, num_ranks=4, args=("gpt", across))) > 200


def compare_passes_with_program(rank: int, plan: Plan) -> int:
    """Two passes of which the last one crosses nodes."""
    model, batch = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, plan)
    with tape(model) as recorded:
        for step in range(2):
            for keeps in (True, False):
                with accumulate(model, enabled=keeps):
                    cross_entropy(model, batch(step, rank)).backward()
                entries = recorded.take()
                program = build(engine_of(model).core.followed.spec, plan=plan, reduces=not keeps)
                *before, last = program.rows
                # Only the first pass of a step finds slices on their way.
                found = [operation for row in before for operation in row.operations]
                expected = [str(one) for one in found if keeps or one.kind is not Kind.WAIT_GATHER_SLICE]
                assert [str(entry) for entry in entries] == expected or not step
            optimizer.step()
            optimizer.zero_grad()
            assert [str(entry) for entry in recorded.take()] == [str(one) for one in last.operations]
    return len(entries)


def test_the_tape_of_passes_that_stay_inside_a_node_is_the_program() -> None:
    plan = Plan(strategy="fsdp", across="zero2", mesh=HYBRID)
    assert min(run_ranks(compare_passes_with_program, num_ranks=4, args=(plan,))) > 30


def slices_on_tape(rank: int, plan: Plan) -> list[tuple[str, int, int]]:
    """(bucket, bytes that were reduced, bytes of the slice that was sent on), in the order of the slices."""
    model, batch = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, plan)
    with tape(model) as recorded:
        for step in range(2):
            recorded.take()
            cross_entropy(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        entries = recorded.take()
    reduced = {entry.subject: entry.num_bytes for entry in entries if entry.kind is Kind.REDUCE}
    sent, there = (
        [(entry.subject, reduced[entry.subject], entry.num_bytes) for entry in entries if entry.kind is kind]
        for kind in (Kind.REDUCE_SLICE, Kind.WAIT_SLICE)
    )
    assert sent == there
    return sent


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("shard_grad_op")])
def test_the_tape_of_a_hybrid_mesh_has_a_slice_of_every_bucket(strategy: str) -> None:
    """Also where a bucket is reduced in two dtypes' buffers, and where more than one is under way."""
    mesh = Mesh(replicate=2, shard=2)
    plans = [
        Plan(strategy=strategy, mesh=mesh, reduces_in_flight=2),
        Plan(strategy=strategy, mesh=mesh, precision="bf16", keep_fp32=("*norm*",), reduce_dtype="bf16"),
    ]
    assert min(run_ranks(compare_with_program, num_ranks=4, args=("gpt", plans))) > 100
    for slices in run_ranks(slices_on_tape, num_ranks=4, args=(plans[0],)):
        assert [name for name, _, _ in slices] == ["blocks.2", "blocks.1", "blocks.0", "(root)"]
        assert all(reduced == 2 * sent > 0 for _, reduced, sent in slices)


def count_collectives(rank: int, strategy: str) -> Counter[str]:
    model, batch = MODELS["gpt"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = LateCollectives(BackendCollectives(), seed=rank)
    prepare(model, optimizer, Plan(strategy=strategy), collectives=late)
    for step in range(2):
        late.issued.clear()
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = Counter(name for name, *_ in late.issued)
    engine_of(model).core.wait_gathers()
    return counted


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Everywhere the flags of used parameters. Three blocks and the root: one bucket; one gather after the update; forward and backward.
        ("ddp", {"all_reduce": 2}),
        ("zero1", {"all_reduce": 2, "all_gather": 4}),
        ("zero2", {"reduce_scatter": 4, "all_reduce": 1, "all_gather": 4}),
        ("shard_grad_op", {"reduce_scatter": 4, "all_reduce": 1, "all_gather": 4}),
        # The root and the last block are kept for backward, the two other blocks are gathered twice.
        ("fsdp", {"reduce_scatter": 4, "all_reduce": 1, "all_gather": 6}),
    ],
)
def test_a_step_issues_no_more_collectives_than_it_must(strategy: str, expected: dict[str, int]) -> None:
    for counted in run_ranks(count_collectives, num_ranks=2, args=(strategy,)):
        assert counted == expected
