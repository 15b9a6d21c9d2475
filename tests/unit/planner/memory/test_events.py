"""What each row of a step allocates and frees, written out for a model of two blocks without a trace."""

from dataclasses import replace

import pytest

from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.engine_model import ENGINE_MODELS, engine_model_of
from shardwise.planner.fold import Key
from shardwise.planner.memory.constants import RULES
from shardwise.planner.memory.events import MemorySetting, memory_rows
from shardwise.planner.memory.peak import job_of
from shardwise.planner.memory.replay import Change, MemoryChange, Recategorize, TakeGrads
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.spec import NONE, ROOT, ModelSpec, TensorSpec, UnitSpec
from shardwise.program.spec.step import Line, Stream

TWO = Mesh(shard=2)


def model(*calls: str, never_called: tuple[str, ...] = ()) -> ModelSpec:
    """Units of 1024 fp32 parameters each: 4096 bytes."""
    names = dict.fromkeys((ROOT, *calls, *never_called))
    units = tuple(
        UnitSpec(name=name, class_name="Block", params=(TensorSpec(name=f"{name}.weight", shape=(1024,)),))
        for name in names
    )
    return ModelSpec(name="example", units=units, call_order=(ROOT, *calls))


TWO_BLOCKS = model("blocks.0", "blocks.1")


def shown(change: MemoryChange) -> str:
    match change:
        case Change():
            return f"{change.category} {change.const:+}"
        case TakeGrads():
            return f"take {change.unit}" + (f" but {change.kept}" if change.kept else "")
        case Recategorize():
            return f"{change.before} becomes {change.after}"


def lines(spec: ModelSpec, **options: object) -> list[str]:
    """One line per row that changes anything."""
    plan = Plan(mesh=TWO, **options)  # type: ignore[arg-type]
    job = job_of(spec, plan=plan, num_ranks=2, optimizer="sgd", device="cuda")
    found = [(row.label, [shown(change) for change in row.changes]) for row in job.memory_rows]
    return [f"{label}: {', '.join(changes)}" for label, changes in found if changes]


def test_ddp_gets_a_buffer_with_its_first_gradients_which_becomes_the_gradients() -> None:
    assert lines(TWO_BLOCKS, strategy="ddp") == [
        "grads ready blocks.1: reduce +12288, take blocks.1",
        "grads ready blocks.0: take blocks.0",
        "grads ready (root): take (root)",
        "backward done (root): reduce becomes grads",
    ]


def test_fsdp_gathers_one_ahead_and_has_one_reduce_under_way() -> None:
    assert lines(TWO_BLOCKS, strategy="fsdp") == [
        "before forward (root): gathered +4096, gathered +4096",
        "before forward blocks.0: gathered +4096",
        "after forward blocks.0: gathered -4096",
        "before backward blocks.1: gathered +4096",
        "grads ready blocks.1: gathered -4096, reduce +4096, take blocks.1",
        "grads ready blocks.0: gathered -4096, reduce +4096, take blocks.0, grads +2048, reduce -4096",
        "grads ready (root): gathered -4096, reduce +4096, take (root), grads +2048, reduce -4096",
        "backward done (root): grads +2048, reduce -4096",
    ]


def test_a_unit_in_pieces_has_a_buffer_for_each_and_its_gradients_with_the_first() -> None:
    assert lines(TWO_BLOCKS, strategy="zero2", piece_bytes=2048) == [
        "grads ready blocks.1: reduce +2048, reduce +2048, take blocks.1, grads +2048, reduce -2048",
        "grads ready blocks.0: reduce +2048, reduce -2048, reduce +2048, take blocks.0, grads +2048, reduce -2048",
        "grads ready (root): reduce +2048, reduce -2048, reduce +2048, take (root), grads +2048, reduce -2048",
        "backward done (root): reduce -2048",
    ]


def test_slices_of_pieces_become_part_of_the_gradients() -> None:
    mesh = Mesh(replicate=2, shard=2)
    plan = Plan(strategy="zero2", piece_bytes=2048, mesh=mesh)
    job = job_of(model(), plan=plan, num_ranks=4, optimizer="sgd", device="cuda")
    found = [[shown(change) for change in row.changes] for row in job.memory_rows]
    assert [changes for changes in found if changes] == [
        ["reduce +2048", "reduce +2048", "take (root)", "reduce +1024", "reduce -2048"],
        ["reduce +1024", "reduce -2048", "grads +2048", "reduce -1024", "reduce -1024"],
    ]


def test_fully_shard_copies_out_of_a_flat_buffer_which_forward_keeps_until_the_next() -> None:
    assert lines(TWO_BLOCKS, strategy="fsdp", engine="torch") == [
        "before forward (root): gathered +4096, gathered +4096",
        "before forward blocks.0: gathered +4096, gathered +4096, gathered -4096",
        "after forward blocks.0: gathered -4096",
        "before forward blocks.1: gathered +4096, gathered +4096, gathered -4096",
        "after forward blocks.1: gathered -4096",
        "after forward (root): gathered -4096",
        "before backward (root): gathered +4096",
        "before backward blocks.1: gathered +4096, gathered -4096, gathered +4096",
        "grads ready blocks.1: gathered -4096, reduce +4096, take blocks.1 but 4096, grads +2048, take blocks.1",
        "before backward blocks.0: gathered +4096, gathered -4096",
        "grads ready blocks.0: gathered -4096, reduce -4096, reduce +4096, take blocks.0 but 4096, grads +2048, take blocks.0",
        "backward done (root): gathered -4096, reduce -4096, reduce +4096, take (root) but 4096, grads +2048, take (root), "
        "reduce -4096",
    ]


def test_torchs_ddp_changes_nothing() -> None:
    assert lines(TWO_BLOCKS, strategy="ddp", engine="torch") == []


def test_the_bucket_of_a_unit_that_is_never_called_has_a_buffer_before_it_is_waited_for() -> None:
    last = lines(model("blocks.0", never_called=("head",)), strategy="zero2")[-1]
    assert last.startswith("backward done (root): reduce +4096, take head")
    assert last.count("reduce +4096") == 1
    assert last.count("reduce -4096") == 2


class Traced:
    """The rows of a step in an order of the caller's own."""

    def __init__(self, spec: ModelSpec, **options: object) -> None:
        self.plan = Plan(mesh=TWO, **options)  # type: ignore[arg-type]
        self.job = job_of(spec, plan=self.plan, num_ranks=2, optimizer="sgd", device="cuda")

    def lines(self, *keys: Key) -> list[str]:
        job = self.job
        rows = memory_rows(
            job.program,
            job._memory(),
            peaks=[(key, StreamPeak(stream=Stream(), sizes=(), points=(), end=(0, 0, 0, 0, 0))) for key in keys],
            in_order=job.in_order,
            plan=job.plan,
            weights={},
            rules=job.rules,
            saved={unit: Line(0, 0) for _, unit, _ in keys if job.plan.has_activations_on_host(unit)},
        )
        return [f"{row.label}: {', '.join(map(shown, row.changes))}" for row in rows]


def without(keys: list[Key], *left_out: Key) -> list[Key]:
    return [key for key in keys if key not in left_out]


def keys_of(program: StepProgram) -> list[Key]:
    return [(row.trigger.value, row.unit, row.call) for row in program.rows]


def test_a_unit_that_backward_never_makes_ready_is_closed_when_it_has_been_passed() -> None:
    traced = Traced(TWO_BLOCKS, strategy="fsdp")
    keys = without(keys_of(traced.job.program), ("grads ready", "blocks.1", 0))
    found = traced.lines(*keys)
    assert "before backward blocks.0: gathered -4096, reduce +4096, take blocks.1" in found


def test_a_bucket_that_is_complete_early_waits_for_its_turn() -> None:
    traced = Traced(TWO_BLOCKS, strategy="zero2")
    early, late = ("grads ready", "blocks.0", 0), ("grads ready", "blocks.1", 0)
    keys = keys_of(traced.job.program)
    first, second = keys.index(late), keys.index(early)
    keys[first], keys[second] = early, late
    found = [line for line in traced.lines(*keys) if line.startswith("grads ready blocks")]
    assert found == [
        "grads ready blocks.0: reduce +4096, take blocks.0",
        "grads ready blocks.1: reduce +4096, take blocks.1, grads +2048, reduce -4096",
    ]


def test_rows_that_the_trace_lacks_are_the_end_of_backward_and_the_update() -> None:
    traced = Traced(TWO_BLOCKS, strategy="fsdp")
    ends = [("backward done", ROOT, 0), ("after step", ROOT, 0)]
    whole, cut = keys_of(traced.job.program), without(keys_of(traced.job.program), *ends)
    assert traced.lines(*cut) == traced.lines(*whole)


@pytest.mark.parametrize("name", ENGINE_MODELS)
@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_operation_is_handled_or_refused(name: str, kind: Kind) -> None:
    strategy = "ddp" if name == "ddp" else "fsdp"
    plan = Plan(strategy=strategy, engine="shardwise" if name == "shardwise" else "torch", mesh=TWO)
    job = job_of(TWO_BLOCKS, plan=plan, num_ranks=2, optimizer="sgd", device="cuda")
    assert job.engine is engine_model_of(plan) is ENGINE_MODELS[name]
    setting = MemorySetting(
        plan=plan,
        placements=job.placements,
        states=job.states,
        weights={},
        rules=RULES["cuda"],
        update_bytes=0,
        num_params=3,
        num_slices=2,
        owned={},
    )
    executor = job.engine.memory(job.program, setting)
    row = Row(trigger=Trigger.BEFORE_FORWARD, unit=ROOT, call=0, operations=())
    operation = Operation(kind=kind, subject=ROOT)
    occurring = {one.kind for one in job.program.operations()} | {Kind.BROADCAST}
    if kind in occurring or name != "ddp":
        executor.action(operation, row)
    else:
        with pytest.raises(ValueError, match="does not"):
            executor.action(operation, row)


def test_a_detached_unit_is_taken_at_the_end() -> None:
    spec = model("blocks.0")
    units = tuple(replace(unit, backward=NONE) if unit.name == "blocks.0" else unit for unit in spec.units)
    found = lines(replace(spec, units=units), strategy="fsdp")
    assert any(line.startswith("backward done") and "take blocks.0" in line for line in found)
