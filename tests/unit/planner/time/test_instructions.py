"""The instructions of a step, written out for a model of two blocks that computes nothing."""

import pytest

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import job_of
from shardwise.planner.time.collective import rings_of
from shardwise.planner.time.pieces import overhead_of, schedule_of
from shardwise.planner.time.queues import CALL, COMPUTE, SEND, WAIT, Instruction
from shardwise.planner.time.time_executor import TimeExecutor
from shardwise.planner.traffic import sent_bytes
from shardwise.planner.whole_matrices import sizes_of
from shardwise.program import Kind, Operation, Row, Trigger
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

CLUSTER = cluster_of("4xh100-80gb")


def model(*calls: str, never_called: tuple[str, ...] = ()) -> ModelSpec:
    names = dict.fromkeys((ROOT, *calls, *never_called))
    units = tuple(
        UnitSpec(name=name, class_name="Block", params=(TensorSpec(name=f"{name}.weight", shape=(1024,)),))
        for name in names
    )
    return ModelSpec(name="example", units=units, call_order=(ROOT, *calls))


TWO_BLOCKS = model("blocks.0", "blocks.1")


def job(spec: ModelSpec = TWO_BLOCKS, **options: object) -> Job:
    return job_of(spec, plan=Plan(**options), num_ranks=4, optimizer="adamw", device="cuda")  # type: ignore[arg-type]


def shown(instruction: Instruction) -> str:
    words = {COMPUTE: "", SEND: "send ", WAIT: "wait ", CALL: "call "}
    return words[instruction.what] + instruction.name


def lines(spec: ModelSpec = TWO_BLOCKS, **options: object) -> list[str]:
    return list(map(shown, schedule_of(job(spec, **options), cluster=CLUSTER).last))


def test_fsdp_sends_a_gather_ahead_and_waits_for_the_last_reduce_before_the_next() -> None:
    assert lines(strategy="fsdp") == [
        *("copy (root)", "send gather (root)", "copy blocks.0", "send gather blocks.0", "wait gather (root)"),
        *("copy blocks.1", "send gather blocks.1", "wait gather blocks.0", "call free"),
        "wait gather blocks.1",
        # Backward
        *("copy blocks.0", "send gather blocks.0", "call free", "take blocks.1", "send reduce blocks.1"),
        *("wait gather blocks.0", "call free", "take blocks.0"),
        *("wait reduce blocks.1", "average blocks.1", "send reduce blocks.0"),
        *("call free", "take (root)", "wait reduce blocks.0", "average blocks.0", "send reduce (root)"),
        *("send reduce flags", "wait reduce (root)", "average (root)", "update"),
    ]


def test_gathers_of_fully_shard_wait_for_nothing_that_computes() -> None:
    """Issued with its own unit, a gather begins on the device as if it were issued with the unit before."""
    forward = [
        *("copy (root)", "send gather (root)", "copy blocks.0", "send gather blocks.0", "wait gather (root)"),
        *("copy (root)", "copy blocks.1", "send gather blocks.1", "wait gather blocks.0", "copy blocks.0", "call free"),
        *("wait gather blocks.1", "copy blocks.1", "call free"),
    ]
    backward = [
        *("copy blocks.1", "send gather blocks.1", "copy blocks.0", "send gather blocks.0", "wait gather blocks.1"),
        *("copy blocks.1", "call free", "take blocks.1", "send reduce blocks.1"),
        *("wait gather blocks.0", "copy blocks.0", "call free"),
        *("wait reduce blocks.1", "take blocks.0", "send reduce blocks.0"),
        *("call free", "wait reduce blocks.0", "take (root)", "send reduce (root)", "wait reduce (root)", "update"),
    ]
    assert lines(strategy="fsdp", engine="torch") == [*forward, *backward]


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_ddp_of_either_engine_sends_a_bucket_when_its_last_gradients_are_taken(engine: str) -> None:
    found = lines(strategy="ddp", engine=engine)
    bucket = "blocks.1+blocks.0+(root)"
    averages = [f"average {bucket}"] if engine == "shardwise" else []
    flags = ["send reduce flags"] if engine == "shardwise" else []
    assert found == [
        *("take blocks.1", "take blocks.0", "take (root)", f"send reduce {bucket}"),
        *(*flags, f"wait reduce {bucket}", *averages, "update"),
    ]


def test_zero1_leaves_its_gathers_to_the_next_step() -> None:
    found = schedule_of(job(strategy="zero1"), cluster=CLUSTER)
    assert [shown(one) for one in found.update if one.what == SEND] == [
        "send gather (root)",
        "send gather blocks.0",
        "send gather blocks.1",
    ]
    assert found.last[-len(found.update) :] == found.update


def test_slices_cross_a_second_axis_by_each_engines_own_rule() -> None:
    options = {"strategy": "shard_grad_op", "mesh": Mesh(replicate=2, shard=2)}
    ours, torchs = (
        [line for line in lines(engine=engine, **options) if "slice" in line or "reduce" in line]
        for engine in ("shardwise", "torch")
    )
    assert ours[:6] == [
        *("send reduce blocks.1", "wait reduce blocks.1", "copy slice blocks.1", "send reduce slice blocks.1"),
        *("send reduce blocks.0", "wait reduce blocks.0"),
    ]
    assert torchs == [
        *("send reduce blocks.1", "send reduce slice blocks.1", "wait reduce blocks.1"),
        *("send reduce blocks.0", "send reduce slice blocks.0", "wait reduce blocks.0"),
        *("send reduce (root)", "send reduce slice (root)", "wait reduce (root)", "wait reduce slice (root)"),
    ]


def test_each_piece_is_one_collective_of_its_share() -> None:
    found, whole = ([one for one in sent_in(size) if "reduce blocks.1" in one.name] for size in (2048, 0))
    assert [one.name for one in found] == ["reduce blocks.1 1/2", "reduce blocks.1 2/2"]
    # Half of the bytes, and each its latency.
    assert whole[0].seconds < sum(one.seconds for one in found) < 2 * whole[0].seconds
    assert sent_bytes(job(strategy="zero2", piece_bytes=2048)) == sent_bytes(job(strategy="zero2"))
    assert lines(strategy="zero2", piece_bytes=2048)[3:8] == [
        *("take blocks.1 1/2", "send reduce blocks.1 1/2", "take blocks.1 2/2"),
        *("wait reduce blocks.1 1/2", "average blocks.1 1/2"),
    ]


def sent_in(piece_bytes: int) -> list[Instruction]:
    found = schedule_of(job(strategy="zero2", piece_bytes=piece_bytes), cluster=CLUSTER)
    return [one for one in found.last if one.what == SEND]


def test_states_are_updated_in_backward_after_the_last_piece() -> None:
    found = lines(strategy="fsdp", piece_bytes=2048, update="backward")
    assert [line for line in found if line.startswith(("average", "update blocks"))][:3] == [
        *("average blocks.1 1/2", "average blocks.1 2/2", "update blocks.1"),
    ]


def test_passes_before_the_last_take_gradients_and_send_none() -> None:
    found = schedule_of(job(strategy="zero2", accumulate=3), cluster=CLUSTER)
    first = list(map(shown, found.first))
    assert [line for line in first if line.startswith("take")] == ["take blocks.1", "take blocks.0", "take (root)"]
    assert not any("reduce" in line for line in first)


def test_a_unit_that_is_never_called_takes_part_at_the_end() -> None:
    found = lines(model("blocks.0", never_called=("head",)), strategy="zero2")
    at = found.index("take head")
    assert found.index("take (root)") < at < found.index("send reduce head") < found.index("wait reduce head")


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("trigger", [Trigger.BEFORE_FORWARD, Trigger.BACKWARD_DONE])
def test_every_kind_of_operation_is_handled(kind: Kind, trigger: Trigger) -> None:
    planned = job(strategy="fsdp", mesh=Mesh(replicate=2, shard=2))
    assert planned.plan.mesh is not None
    executor = TimeExecutor(
        job=planned,
        cluster=CLUSTER,
        rings=rings_of(planned.plan.mesh, cluster=CLUSTER),
        optimizer="adamw",
        clips=False,
        sizes=sizes_of(planned.spec, plan=planned.plan),
        overhead=overhead_of(planned, cluster=CLUSTER),
        num_pieces=0,
        buckets={bucket.name: bucket for bucket in planned.program.buckets},
    )
    row = Row(trigger=trigger, unit=ROOT, call=0, operations=())
    executor.action(Operation(kind=kind, subject=ROOT, num_bytes=64), row)()
    computes_only = kind in (Kind.FORWARD, Kind.BACKWARD)
    assert bool(executor.instructions) is not computes_only


def named(instruction: Instruction) -> tuple[int, str]:
    return instruction.what, instruction.name
