"""The first step: gathers that ranks agree on one by one, and the order that all of them together saw."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.engine.core.first_forward import FirstForward, Observation, learned
from shardwise.plan import Plan
from shardwise.program import Kind, Row, context_of
from shardwise.program.spec import ANNOUNCED, NONE, ROOT, UNANNOUNCED, ModelSpec, UnitSpec

NAMES = (ROOT, "a", "a.x", "b", "c")


def spec_of(*names: str) -> ModelSpec:
    units = tuple(UnitSpec(name=name, class_name="Block") for name in names)
    return ModelSpec(name="example", units=units, call_order=names)


def saw(*calls: str, **backward: str) -> Observation:
    return Observation(calls=(ROOT, *calls), backward=backward, gathered=frozenset())


def order_of(*seen: Observation, sharded: Sequence[str] = ()) -> tuple[str, ...]:
    return learned(spec_of(*NAMES), seen=seen, sharded=sharded, trainable=set()).call_order


# The order of all ranks


def test_one_rank_s_calls_are_the_order() -> None:
    assert order_of(saw("b", "a", "b")) == (ROOT, "b", "a", "b")


def test_ranks_that_saw_the_same_give_it_once() -> None:
    assert order_of(saw("a", "b"), saw("a", "b"), saw("a", "b")) == (ROOT, "a", "b")


def test_what_ranks_have_in_common_is_there_once_and_branches_one_after_the_other() -> None:
    assert order_of(saw("a", "c"), saw("b", "c")) == (ROOT, "a", "b", "c")
    # In the order of their names, after which a unit that nobody called finds its place.
    assert order_of(saw("b"), saw("a"), sharded=("c",)) == (ROOT, "a", "b", "c")
    assert order_of(saw("a", "b", "c"), saw("a", "c")) == (ROOT, "a", "b", "c")
    assert order_of(saw(), saw("a"), saw("a", "a")) == (ROOT, "a", "a")


def test_a_sharded_unit_that_nobody_called_has_its_place_after_the_one_registered_before_it() -> None:
    assert order_of(saw("a", "c"), sharded=NAMES) == (ROOT, "a", "a.x", "b", "c")
    # After the last call of it.
    assert order_of(saw("a", "c", "a"), sharded=("a.x",)) == (ROOT, "a", "c", "a", "a.x")


def test_a_replicated_unit_that_nobody_called_has_no_place() -> None:
    assert order_of(saw("a"), sharded=("a",)) == (ROOT, "a")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([NONE, ANNOUNCED], ANNOUNCED),
        ([UNANNOUNCED, ANNOUNCED, NONE], UNANNOUNCED),
        ([NONE, NONE], NONE),
        # Nobody called it; where somebody does later, gradients may come.
        ([], ANNOUNCED),
    ],
)
def test_backward_comes_to_a_unit_as_the_most_demanding_rank_says(answers: list[str], expected: str) -> None:
    seen = [saw("a", a=answer) for answer in answers] or [saw()]
    assert learned(spec_of(*NAMES), seen=seen, sharded=(), trainable=set()).unit("a").backward == expected


calls = st.lists(st.sampled_from(NAMES[1:]), max_size=8).map(lambda names: saw(*names))


def is_within(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether `part` is what is left of `whole` when some of it is left out."""
    rest = iter(whole)
    return all(name in rest for name in part)


@settings(max_examples=100)
@given(st.lists(calls, min_size=1, max_size=4))
def test_the_order_holds_every_ranks_calls_and_is_the_same_for_all(seen: list[Observation]) -> None:
    order = order_of(*seen, sharded=NAMES)
    assert set(order) == set(NAMES)
    for observation in seen:
        assert is_within(observation.calls, order)


@settings(max_examples=100)
@given(st.lists(calls, min_size=1, max_size=4))
def test_every_call_of_a_rank_finds_its_place_in_the_order(seen: list[Observation]) -> None:
    order = order_of(*seen, sharded=NAMES)
    for observation in seen:
        forward = first_forward({})
        forward.calls = list(observation.calls)
        places = forward.places_in(order)
        numbered = [(name, observation.calls[:i].count(name)) for i, name in enumerate(observation.calls)]
        assert list(places) == numbered
        # Where they are is in the order in which they were made.
        positions = [[i for i, other in enumerate(order) if other == name] for name, _ in numbered]
        found = [where[places[call]] for where, call in zip(positions, numbered, strict=True)]
        assert found == sorted(set(found))


# The first forward


class FakeUnit:
    """A unit that notes down what is done to it."""

    def __init__(self, name: str, notes: list[str], *, whole: bool = False) -> None:
        self.name = name
        self.notes = notes
        self.whole = whole

    def gather(self) -> None:
        self.notes.append(f"gather {self.name}")
        self.whole = True

    def wait_gather(self) -> None:
        self.notes.append(f"wait {self.name}")

    def free(self) -> None:
        self.notes.append(f"free {self.name}")
        self.whole = False


def first_forward(units: dict[str, Any], *, exchange: Callable[[str], list[str]] = lambda wish: [wish]) -> FirstForward:
    """Runs rows on the units, as a cursor does."""

    def run(row: Row) -> None:
        for operation in row.operations:
            unit = units[operation.subject]
            do = {Kind.GATHER: unit.gather, Kind.WAIT_GATHER: unit.wait_gather, Kind.FREE: unit.free}
            do[operation.kind]()

    context = context_of(spec_of(*NAMES), plan=Plan())
    return FirstForward(units, context=context, distinct=lambda wish: list(dict.fromkeys(exchange(wish))), run=run)


def fake_units(*, whole: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    return {name: FakeUnit(name, notes, whole=name in whole) for name in NAMES}, notes


def others(*wishes: list[str]) -> Callable[[str], list[str]]:
    """An exchange with ranks that wish for these, round by round, and then for nothing."""
    rounds = iter(wishes)
    return lambda wish: [wish, *next(rounds, [""])]


def test_a_unit_that_is_wanted_is_gathered_and_waited_for() -> None:
    units, notes = fake_units()
    first_forward(units).want(units["a"])
    assert notes == ["gather a", "wait a"]


def test_a_unit_that_is_whole_asks_nobody() -> None:
    units, notes = fake_units(whole=["a"])

    def nobody(wish: str) -> list[str]:
        raise AssertionError("no exchange is needed")

    first_forward(units, exchange=nobody).want(units["a"])
    assert not notes


def test_a_rank_takes_part_in_what_others_want_and_frees_it_at_once() -> None:
    units, notes = fake_units()
    first_forward(units, exchange=others(["b", "c"])).want(units["a"])
    assert notes == ["gather a", "wait a", "gather b", "wait b", "free b", "gather c", "wait c", "free c"]


def test_what_a_rank_uses_itself_stays_whole_when_others_want_it() -> None:
    units, notes = fake_units(whole=["b"])
    first_forward(units, exchange=others(["b"])).want(units["a"])
    assert notes == ["gather a", "wait a", "gather b", "wait b"]
    assert units["b"].whole


def test_a_rank_that_is_done_takes_part_until_all_are() -> None:
    units, notes = fake_units(whole=[ROOT])
    forward = first_forward(units, exchange=others(["b"], ["c"], [""]))
    forward.note_call(units[ROOT])
    seen = forward.end()
    assert notes == ["gather b", "wait b", "free b", "gather c", "wait c", "free c"]
    assert seen == Observation(calls=(ROOT,), backward={}, gathered=frozenset({ROOT}))


def test_calls_are_numbered_by_unit() -> None:
    units, _ = fake_units()
    forward = first_forward(units)
    assert [forward.note_call(units[name]) for name in (ROOT, "a", "b", "a", "a")] == [0, 0, 0, 1, 2]
    assert forward.end().calls == (ROOT, "a", "b", "a", "a")


def test_of_several_calls_of_a_unit_the_most_demanding_counts() -> None:
    units, _ = fake_units()
    forward = first_forward(units)
    for how in (NONE, UNANNOUNCED, ANNOUNCED):
        forward.note_backward(units["a"], how)
    forward.note_backward(units["b"], NONE)
    assert forward.end().backward == {"a": UNANNOUNCED, "b": NONE}


def test_a_ranks_calls_are_placed_among_those_of_all_ranks() -> None:
    units, _ = fake_units()
    forward = first_forward(units)
    for name in (ROOT, "b", "a"):
        forward.note_call(units[name])
    # Other ranks call a before b too: this rank's first call of a is the second of all.
    assert forward.places_in((ROOT, "a", "b", "a", "c")) == {(ROOT, 0): 0, ("b", 0): 0, ("a", 0): 1}


def test_all_ranks_gather_the_same_in_the_same_order() -> None:
    """Three ranks in lock step, each with a forward of its own."""
    wanted = (["a", "b"], ["b", "c", "a"], [])
    ranks = [fake_units() for _ in wanted]
    waiting = [list(names) for names in wanted]
    while any(waiting):
        wishes = [names[0] if names else "" for names in waiting]
        for (units, _), names in zip(ranks, waiting, strict=True):
            forward = first_forward(units, exchange=lambda _, wishes=wishes: wishes)
            if names:
                forward.want(units[names.pop(0)])
            else:
                forward._round("")
    gathers = [[note for note in notes if note.startswith("gather")] for _, notes in ranks]
    assert gathers[0] == gathers[1] == gathers[2] == ["gather a", "gather b", "gather b", "gather c", "gather a"]
