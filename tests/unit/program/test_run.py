"""The loop over a program's rows, with an executor that notes down what it is asked to do."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.random_specs import cases, specs

from shardwise.plan import Plan
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger, build, context_of
from shardwise.program.operations import ON_BUCKETS
from shardwise.program.rules.learning import LEARNING
from shardwise.program.run import Cursor
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

BEFORE, AFTER, BACK = Trigger.BEFORE_FORWARD, Trigger.AFTER_FORWARD, Trigger.BEFORE_BACKWARD


class Noting:
    """Notes down each operation; those of rows that were skipped apart."""

    def __init__(self) -> None:
        self.done: list[Operation] = []
        self.skipped_operations: list[Operation] = []
        self.all: list[Operation] = []
        self.ready: set[str] = set()

    def action(self, operation: Operation, row: Row) -> Callable[[], None]:
        return partial(self._note, operation, self.done)

    def skipped(self, operation: Operation, row: Row) -> Callable[[], None] | None:
        return partial(self._note, operation, self.skipped_operations) if operation.kind is not Kind.FORWARD else None

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    def _note(self, operation: Operation, notes: list[Operation]) -> None:
        notes.append(operation)
        self.all.append(operation)

    def take(self) -> str:
        """What was done since the last time."""
        line = "; ".join(map(str, self.done))
        self.done.clear()
        return line

    def take_skipped(self) -> str:
        line = "; ".join(map(str, self.skipped_operations))
        self.skipped_operations.clear()
        return line


def model(*calls: str, never_called: tuple[str, ...] = ()) -> ModelSpec:
    """A model whose forward calls the root and then these units, of 10 fp32 parameters each."""
    units = tuple(
        UnitSpec(name=name, class_name="Block", params=(TensorSpec(name=f"{name}.weight", shape=(10,)),))
        for name in dict.fromkeys((ROOT, *calls, *never_called))
    )
    return ModelSpec(name="example", units=units, call_order=(ROOT, *calls))


def start(spec: ModelSpec, **settings: object) -> tuple[Cursor, Noting]:
    executor = Noting()
    return at_start(build(spec, plan=Plan.from_dict(settings)), executor), executor


def at_start(program: StepProgram, executor: Noting) -> Cursor:
    cursor = Cursor(executor)
    cursor.follow(program)
    return cursor


def forward(cursor: Cursor) -> None:
    """Come by every row of forward."""
    cursor.restart()
    for row in cursor.program.rows[: cursor.program.first_of_backward]:
        assert cursor.reach(row.trigger, row.unit, row.call)


def ready(cursor: Cursor, executor: Noting, unit: str) -> str:
    """The unit's gradients are complete; what is done about it."""
    executor.ready.add(unit)
    cursor.grads_ready(SimpleNamespace(name=unit))
    return executor.take()


def backward_of(
    *calls: str, in_order: bool = True, keeping: StepProgram | None = None, **settings: object
) -> tuple[Cursor, Noting]:
    """A cursor whose backward has just begun."""
    cursor, executor = start(model(*calls), **settings)
    forward(cursor)
    cursor.begin_backward(in_order=in_order, keeping=None if keeping is None else (lambda: keeping))
    executor.take()
    return cursor, executor


# Rows


def test_a_row_is_done_when_it_is_reached() -> None:
    cursor, executor = start(model("a", "b"), strategy="fsdp", prefetch=0)
    shown = []
    for trigger, unit in [(BEFORE, ROOT), (BEFORE, "a"), (AFTER, "a"), (BEFORE, "b")]:
        assert cursor.reach(trigger, unit, 0)
        shown.append(executor.take())
    assert shown == [
        "gather (root); wait gather (root); forward (root)",
        "gather a; wait gather a; forward a",
        "free a",
        "gather b; wait gather b; forward b",
    ]
    assert not executor.skipped_operations


def test_a_row_that_is_not_come_by_is_given_as_skipped_before_a_later_one_runs() -> None:
    cursor, executor = start(model("a", "b"), strategy="fsdp", prefetch=0)
    cursor.reach(BEFORE, ROOT, 0)
    cursor.reach(BEFORE, "b", 0)
    # The executor has nothing to do where a forward was skipped.
    assert "; ".join(map(str, executor.all[3:])) == (
        "gather a; wait gather a; free a; gather b; wait gather b; forward b"
    )
    assert executor.take_skipped() == "gather a; wait gather a; free a"


def test_a_call_that_the_program_does_not_know_is_not_done() -> None:
    cursor, executor = start(model("a", "b"), strategy="fsdp")
    cursor.reach(BEFORE, ROOT, 0)
    executor.take()
    assert not cursor.reach(BEFORE, "a", 1)
    assert not cursor.reach(BEFORE, "c", 0)
    assert not executor.take()
    assert not executor.take_skipped()
    # And the program goes on where it stood.
    assert cursor.reach(BEFORE, "a", 0)


def test_a_call_that_the_program_is_past_is_not_done_again() -> None:
    cursor, executor = start(model("a", "b"), strategy="fsdp")
    cursor.reach(BEFORE, "b", 0)
    executor.take()
    assert not cursor.reach(BEFORE, "b", 0)
    assert not cursor.reach(BEFORE, "a", 0)
    assert not executor.take()


def test_a_forward_that_starts_again_comes_by_its_rows_again() -> None:
    cursor, executor = start(model("a"), strategy="fsdp", prefetch=0)
    forward(cursor)
    first = executor.take()
    forward(cursor)
    assert executor.take() == first


def test_a_first_forward_runs_its_rules_and_backward_begins_behind_the_programs_forward() -> None:
    cursor, executor = start(model("a", "b"), strategy="fsdp")
    cursor.learn(LEARNING, context_of(model("a", "b"), plan=Plan()))
    # In an order that no program has.
    for unit in (ROOT, "b", "a"):
        assert cursor.reach(BEFORE, unit, 0)
    assert cursor.reach(AFTER, "a", 0)
    assert executor.take() == (
        "gather (root); wait gather (root); forward (root); gather b; wait gather b; forward b; "
        "gather a; wait gather a; forward a; free a"
    )
    cursor.learned(places={})
    assert cursor.reach(BACK, ROOT, 0)
    assert not executor.skipped_operations
    assert not cursor.reach(BEFORE, "a", 0)


def test_calls_are_counted_in_order() -> None:
    cursor, _ = start(model("a", "b", "a"), strategy="fsdp")
    cursor.reach(BEFORE, ROOT, 0)
    assert cursor.call_of("a", after=-1) == 0
    cursor.reach(BEFORE, "a", 0)
    assert cursor.call_of("a", after=0) == 1


def test_the_next_call_of_a_unit_is_one_that_was_not_skipped() -> None:
    cursor, _ = start(model("a", "b", "a"), strategy="fsdp")
    cursor.reach(BEFORE, "b", 0)
    assert cursor.call_of("a", after=-1) == 1
    assert cursor.reach(BEFORE, "a", 1)


def test_a_call_more_than_the_program_has_gets_a_number_that_it_does_not_know() -> None:
    cursor, _ = start(model("a", "b"), strategy="fsdp")
    cursor.reach(BEFORE, "b", 0)
    call = cursor.call_of("a", after=-1)
    assert call == 1
    assert not cursor.reach(BEFORE, "a", call)
    assert cursor.call_of("never seen", after=-1) == 0


# Gradients, in order


def test_in_order_an_early_unit_waits_for_its_turn() -> None:
    cursor, executor = backward_of("a", "b", strategy="zero2", reduces_in_flight=4)
    cursor.reach(BACK, ROOT, 0)
    cursor.reach(BACK, "b", 0)
    executor.take()
    assert ready(cursor, executor, ROOT) == ""
    assert ready(cursor, executor, "b") == "take grads b; reduce b"
    cursor.reach(BACK, "a", 0)
    executor.take()
    # The root, which was ready long ago, follows on it.
    assert ready(cursor, executor, "a") == "take grads a; reduce a; take grads (root); reduce (root)"


def test_in_order_a_unit_that_backward_has_passed_is_closed_when_the_cursor_passes_it() -> None:
    cursor, executor = backward_of("a", "b", strategy="fsdp", prefetch=0, reduces_in_flight=4)
    cursor.reach(BACK, "b", 0)
    executor.take()
    cursor.reach(BACK, "a", 0)
    assert executor.take() == "free b; take grads b; reduce b; gather a; wait gather a; backward a"
    # Its last gradient came after all, and there is nothing left to do.
    assert ready(cursor, executor, "b") == ""


def test_in_order_a_unit_that_is_never_ready_is_closed_at_the_end() -> None:
    cursor, executor = backward_of("a", "b", strategy="fsdp", prefetch=0, reduces_in_flight=4)
    for unit in (ROOT, "b"):
        cursor.reach(BACK, unit, 0)
    ready(cursor, executor, "b")
    cursor.end_backward()
    assert executor.take() == (
        "free a; take grads a; reduce a; free (root); take grads (root); reduce (root); "
        "reduce flags (root); wait reduce b; wait reduce a; wait reduce (root)"
    )
    assert executor.take_skipped() == "gather a; wait gather a; backward a"


def test_a_unit_whose_gradients_nobody_expected_is_taken_at_the_end() -> None:
    cursor, executor = start(model("a", never_called=("b",)), strategy="zero2", reduces_in_flight=4)
    forward(cursor)
    cursor.begin_backward(in_order=True)
    executor.take()
    assert ready(cursor, executor, "b") == ""
    cursor.end_backward()
    assert executor.take() == (
        "take grads a; reduce a; take grads (root); reduce (root); take grads b; reduce b; "
        "reduce flags (root); wait reduce a; wait reduce (root); wait reduce b"
    )


# Gradients, out of order


def test_out_of_order_gradients_are_taken_at_once_and_reduced_in_the_programs_order() -> None:
    cursor, executor = backward_of("a", "b", in_order=False, strategy="zero2", reduces_in_flight=4)
    assert ready(cursor, executor, ROOT) == "take grads (root)"
    assert ready(cursor, executor, "a") == "take grads a"
    assert ready(cursor, executor, "b") == "take grads b; reduce b; reduce a; reduce (root)"


def test_out_of_order_everything_is_gathered_before_the_first_gradients_are_taken() -> None:
    """A rank that waits for a gather would wait for ever for one that waits for a reduce."""
    cursor, executor = backward_of("a", "b", in_order=False, strategy="fsdp", prefetch=0, reduces_in_flight=4)
    cursor.reach(BACK, ROOT, 0)
    executor.take()
    executor.take_skipped()
    assert ready(cursor, executor, "b") == "free b; take grads b; reduce b"
    assert "gather a" in executor.take_skipped()
    assert not cursor.reach(BACK, "a", 0)


def test_two_buckets_that_are_complete_in_the_wrong_order_are_reduced_in_the_right_one() -> None:
    cursor, executor = backward_of("a", "b", "c", in_order=False, strategy="ddp", bucket_bytes=80)
    assert [bucket.name for bucket in cursor.program.buckets] == ["c+b", "a+(root)"]
    taken = [ready(cursor, executor, unit) for unit in ("a", ROOT, "c", "b")]
    assert taken == [
        "take grads a",
        "take grads (root)",
        "take grads c",
        "take grads b; reduce c+b; reduce a+(root)",
    ]


def test_out_of_order_what_never_came_is_closed_at_the_end_in_the_programs_order() -> None:
    cursor, executor = backward_of("a", "b", in_order=False, strategy="zero2", reduces_in_flight=4)
    ready(cursor, executor, "a")
    cursor.end_backward()
    assert executor.take() == (
        "take grads b; reduce b; reduce a; take grads (root); reduce (root); "
        "reduce flags (root); wait reduce b; wait reduce a; wait reduce (root)"
    )


def test_out_of_order_a_unit_is_not_closed_by_passing_it() -> None:
    cursor, executor = backward_of("a", "b", in_order=False, strategy="zero2")
    cursor.reach(BACK, "a", 0)
    assert executor.take() == "backward a"
    assert ready(cursor, executor, "b") == "take grads b; reduce b"


# Several backwards


def whole_backward(cursor: Cursor, executor: Noting) -> str:
    """Come by every row of a backward; what is done with gradients."""
    for row in cursor.program.rows[cursor.program.first_of_backward :]:
        if row.trigger is BACK:
            cursor.reach(BACK, row.unit, row.call)
        elif row.trigger is Trigger.GRADS_READY:
            executor.ready.add(row.unit)
            cursor.grads_ready(SimpleNamespace(name=row.unit))
    cursor.end_backward()
    executor.ready.clear()
    kinds = (Kind.TAKE_GRADS, *ON_BUCKETS, Kind.REDUCE_FLAGS)
    shown = "; ".join(str(operation) for operation in executor.done if operation.kind in kinds)
    executor.done.clear()
    return shown


@pytest.mark.parametrize("in_order", [True, False])
def test_a_second_backward_of_a_forward_reduces_everything_at_its_end(in_order: bool) -> None:
    cursor, executor = backward_of("a", "b", in_order=in_order, strategy="zero2", reduces_in_flight=4)
    first = whole_backward(cursor, executor)
    cursor.begin_backward(in_order=in_order)
    assert not cursor.reach(BACK, ROOT, 0)
    if in_order:
        # All rows are passed, so there is no turn to wait for before the end.
        assert ready(cursor, executor, "b") == ""
    assert whole_backward(cursor, executor) == first
    cursor.before_step()
    cursor.after_step()
    assert executor.take() == "update (root); gather (root); gather a; gather b"


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_pass_that_keeps_its_gradients_reduces_nothing_and_the_next_one_does(strategy: str, in_order: bool) -> None:
    spec, plan = model("a", "b"), Plan(strategy=strategy, reduces_in_flight=4)
    keeping = build(spec, plan=plan, reduces=False)
    cursor, executor = start(spec, strategy=strategy, reduces_in_flight=4)
    backwards = []
    for keeps in (lambda: keeping, lambda: keeping, None):
        forward(cursor)
        cursor.begin_backward(in_order=in_order, keeping=keeps)
        executor.take()
        backwards.append(whole_backward(cursor, executor))
    assert backwards[:2] == ["take grads b; take grads a; take grads (root)"] * 2
    kinds = {operation.kind for operation in keeping.operations()}
    assert not kinds & {*ON_BUCKETS, Kind.REDUCE_FLAGS}
    assert backwards[2].count("; reduce flags") == 1
    for bucket in cursor.program.buckets:
        assert backwards[2].count(f"; reduce {bucket.name}") == 1


@pytest.mark.parametrize("in_order", [True, False])
def test_a_backward_after_one_that_raised_starts_clean(in_order: bool) -> None:
    cursor, executor = backward_of("a", "b", in_order=in_order, strategy="zero2", reduces_in_flight=4)
    expected = whole_backward(cursor, executor)
    forward(cursor)
    cursor.begin_backward(in_order=in_order)
    cursor.reach(BACK, "b", 0)
    assert "reduce b" in ready(cursor, executor, "b")
    executor.ready.clear()
    # It raised here; the user goes on with the next batch.
    forward(cursor)
    cursor.begin_backward(in_order=in_order)
    executor.take()
    assert whole_backward(cursor, executor) == expected


# The update


def test_the_update_row_is_cut_at_the_update() -> None:
    # Nobody calls b, so nobody has waited for what was gathered after the last update.
    cursor, executor = start(model("a", never_called=("b",)), strategy="zero1")
    cursor.before_step()
    assert executor.take() == "wait gather b"
    cursor.after_step()
    assert executor.take() == "update (root); gather (root); gather a; gather b"


def test_the_update_after_a_pass_that_kept_its_gradients_is_that_of_the_program() -> None:
    spec, plan = model("a"), Plan(strategy="zero1")
    cursor, executor = backward_of("a", strategy="zero1", keeping=build(spec, plan=plan, reduces=False))
    whole_backward(cursor, executor)
    cursor.before_step()
    cursor.after_step()
    assert executor.take() == "update (root); gather (root); gather a"


# Any program


def walk(program: StepProgram, *, leaves_out: frozenset[int] = frozenset(), in_order: bool | None = True) -> Noting:
    """Run a step in program order, without the rows of these indices."""
    executor = Noting()
    cursor = at_start(program, executor)
    first_of_backward = program.first_of_backward
    for index, row in enumerate(program.rows):
        if index == first_of_backward:
            cursor.begin_backward(in_order=in_order)
        if row.trigger is Trigger.BACKWARD_DONE:
            cursor.end_backward()
        elif row.trigger is Trigger.AFTER_STEP:
            cursor.before_step()
            cursor.after_step()
        elif index in leaves_out:
            continue
        elif row.trigger is Trigger.GRADS_READY:
            executor.ready.add(row.unit)
            cursor.grads_ready(SimpleNamespace(name=row.unit))
        else:
            # Out of order, rows of backward are passed when the first gradients are taken.
            passes = in_order is False and index >= first_of_backward
            assert cursor.reach(row.trigger, row.unit, row.call) or passes
    return executor


@settings(max_examples=40)
@given(cases(specs() | specs(repeated_root=True)))
def test_a_run_that_comes_by_every_row_does_exactly_the_program(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    program = build(spec, plan=plan)
    executor = walk(program)
    assert executor.all == list(program.operations())
    assert not executor.skipped_operations


ISSUED_BY_ALL_RANKS = (Kind.GATHER, Kind.REDUCE, Kind.REDUCE_SLICE, Kind.REDUCE_FLAGS)


@settings(max_examples=60)
@given(cases(specs() | specs(repeated_root=True)), st.sets(st.integers(0, 40)), st.sampled_from([True, False, None]))
def test_whatever_a_run_comes_by_all_collectives_are_issued_once_and_in_order(
    case: tuple[ModelSpec, Plan], leaves_out: set[int], in_order: bool | None
) -> None:
    """Gathers among each other, and reduces among each other: their groups do not wait for one another."""
    spec, plan = case
    program = build(spec, plan=plan)
    executor = walk(program, leaves_out=frozenset(leaves_out), in_order=in_order)
    for stream in ("gather", "reduce"):
        expected, issued = (
            [one for one in operations if one.kind in ISSUED_BY_ALL_RANKS and one.kind.stream == stream]
            for operations in (program.operations(), executor.all)
        )
        assert issued == expected
    taken = [operation.subject for operation in executor.done if operation.kind is Kind.TAKE_GRADS]
    assert sorted(taken) == sorted(bucket.taken_as(unit) for bucket in program.buckets for unit in bucket.units)


@settings(max_examples=40)
@given(cases(specs()), st.randoms(use_true_random=False), st.booleans())
def test_in_whatever_order_gradients_come_reduces_are_in_the_programs(
    case: tuple[ModelSpec, Plan], chance: random.Random, in_order: bool
) -> None:
    spec, plan = case
    program = build(spec, plan=plan)
    executor = Noting()
    cursor = at_start(program, executor)
    forward(cursor)
    cursor.begin_backward(in_order=in_order)
    happenings = [row for row in program.rows if row.trigger in (BACK, Trigger.GRADS_READY)]
    chance.shuffle(happenings)
    for row in happenings:
        if row.trigger is BACK:
            cursor.reach(BACK, row.unit, row.call)
        else:
            executor.ready.add(row.unit)
            cursor.grads_ready(SimpleNamespace(name=row.unit))
    cursor.end_backward()
    on_buckets, expected = (
        [operation for operation in operations if operation.kind in ON_BUCKETS]
        for operations in (executor.all, program.operations())
    )
    assert on_buckets == expected
