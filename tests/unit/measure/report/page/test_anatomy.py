"""The anatomy shows what the tape says, or nothing: frames come from the recording, bytes from the ledger."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from measure.report.sample_bench import sample_bench

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.measure.bench.case_result import CaseResult, UnitOutline
from shardwise.measure.bench.results import Bench
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.profile.memory_ledger import LedgerEntry, MemoryLedger
from shardwise.measure.report.page.anatomy import SCRIPT, STYLE, anatomy_data
from shardwise.measure.report.page.captions import caption
from shardwise.measure.report.page.html_document import asset
from shardwise.measure.report.snapshots import STATES, Holding, snapshots_of
from shardwise.measure.report.text.ring_rounds import rounds
from shardwise.models.specs.spec_store import ready_spec
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh, Placement
from shardwise.program import Kind, build
from shardwise.program.spec import ROOT, ModelSpec

States = list[dict[str, dict[str, str]]]
"""Before the first operation and after each: params, grads, optim → unit → what is held."""


def shipped(name: str) -> ModelSpec:
    spec = ready_spec(name, ways=())
    assert spec is not None
    return spec


@pytest.fixture(scope="module")
def bench() -> Bench:
    return sample_bench()


@pytest.fixture(scope="module")
def data(bench: Bench) -> dict[str, Any]:
    found = anatomy_data(bench)
    assert found is not None
    return json.loads(json.dumps(found))


def bytes_after(differences: list[list[int]], frame: int) -> dict[str, int]:
    """What the script makes of the differences."""
    return {name: sum(row[at] for row in differences[: frame + 1]) for at, name in enumerate(CATEGORIES)}


def case_of(data: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next(case for case in data["cases"] if case["name"] == strategy)


def states_of(data: dict[str, Any], strategy: str) -> States:
    """What the script makes of the differences."""
    case = case_of(data, strategy)
    names = [name for name, _ in case["units"]]
    numbers = [list(case["start"])]
    for *_, changes in case["frames"]:
        numbers.append(list(numbers[-1]))
        for index, held in zip(changes[::2], changes[1::2], strict=True):
            numbers[-1][index] = held
    keys = [(state, name) for state in data["states"] for name in names]
    words = [[data["held"][number] for number in row] for row in numbers]
    return [
        {state: {name: row[keys.index((state, name))] for name in names} for state in data["states"]} for row in words
    ]


def operations_of(data: dict[str, Any], strategy: str) -> list[str]:
    case = case_of(data, strategy)
    return [f"{data['kinds'][kind]} {case['subjects'][subject][0]}" for kind, subject, *_ in case["frames"]]


def with_tape(bench: Bench, strategy: str, tape: tuple[Happening, ...]) -> Bench:
    """That strategy alone, as if it had left another tape."""
    case = next(case for case in bench.cases if (case.engine, case.strategy) == ("shardwise", strategy))
    return replace(bench, cases=(replace(case, tape=tape),))


def tape_of(bench: Bench, strategy: str) -> tuple[Happening, ...]:
    return next(case.tape for case in bench.cases if (case.engine, case.strategy) == ("shardwise", strategy))


def made_bench(spec: ModelSpec, *, bench: Bench, num_ranks: int, **settings: Any) -> Bench:
    """A bench of another model or mesh: the program as a tape, and a ledger whose numbers all differ."""
    cases = []
    mesh = Mesh(**settings["plan.mesh"]) if "plan.mesh" in settings else None
    for strategy in STRATEGIES:
        program = build(spec, plan=Plan(strategy=strategy, overrides=settings.get("plan.overrides", {}), mesh=mesh))
        tape = [
            Happening(kind=one.kind.value, subject=one.subject, num_bytes=one.num_bytes, seconds=row * 1e-3, row=row)
            for row, row_ in enumerate(program.rows)
            for one in row_.operations
        ]
        ledgers = [
            MemoryLedger(
                entries=tuple(
                    LedgerEntry(
                        at=str(row),
                        num_bytes={name: 10**9 + 7919 * row * (at + rank) for at, name in enumerate(CATEGORIES)},
                    )
                    for row in range(len(program.rows))
                ),
                at_rest=LedgerEntry(at="at rest", num_bytes=dict.fromkeys(CATEGORIES, 1)),
            )
            for rank in range(num_ranks)
        ]
        units = tuple(
            UnitOutline(name=unit.name, num_params=unit.num_params, num_trained=unit.num_params) for unit in spec.units
        )
        buckets = {bucket.name: bucket.units for bucket in program.buckets}
        case = CaseResult(engine="shardwise", strategy=strategy, units=units, buckets=buckets, tape=tuple(tape))
        cases.append(replace(case, ledgers=tuple(ledgers)))
    return replace(bench, cases=tuple(cases), num_ranks=num_ranks, settings=settings)


class Test_frames:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_there_is_one_per_entry_of_the_tape_in_its_order(
        self, bench: Bench, data: dict[str, Any], strategy: str
    ) -> None:
        tape, case = tape_of(bench, strategy), case_of(data, strategy)
        # The sample's tape is scaled to the case's step time.
        scale = next(one.tape_scale for one in bench.cases if one.name == strategy)
        for happening, (kind, subject, num_bytes, _, micros, _) in zip(tape, case["frames"], strict=True):
            label, units = case["subjects"][subject]
            assert data["kinds"][kind] == happening.kind
            assert label == happening.subject or [case["units"][unit][0] for unit in units] == happening.subject.split(
                "+"
            )
            assert (num_bytes, micros) == (
                happening.num_bytes, round(happening.seconds * scale * 1e6),
            )  # fmt: skip

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_the_tape_of_a_program_gives_what_explain_shows_of_it(self, bench: Bench, strategy: str) -> None:
        spec = shipped("gpt-tiny")
        data = anatomy_data(made_bench(spec, bench=bench, num_ranks=4))
        assert data is not None
        frames = snapshots_of(spec, plan=Plan(strategy=strategy), num_ranks=4).snapshots
        drawn = [
            {state: {name: held.value for name, held in frame.holds[state].items()} for state in STATES}
            for frame in frames
        ]
        assert states_of(data, strategy) == drawn

    def test_fsdp_holds_slices_before_and_after_a_step(self, data: dict[str, Any]) -> None:
        states = states_of(data, "fsdp")
        for state in (states[0], states[-1]):
            assert set(state["params"].values()) == set(state["optim"].values()) == {Holding.SLICE.value}
        assert set(states[-1]["grads"].values()) == {Holding.SLICE.value}

    def test_ddp_holds_all_parameters_and_their_state_whole_all_through(self, data: dict[str, Any]) -> None:
        for state in states_of(data, "ddp"):
            assert set(state["params"].values()) == set(state["optim"].values()) == {Holding.WHOLE.value}

    @pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])
    def test_what_is_gathered_is_freed(self, data: dict[str, Any], strategy: str) -> None:
        gathered: list[str] = []
        states = states_of(data, strategy)
        for operation, after in zip(operations_of(data, strategy), states[1:], strict=True):
            kind, name = operation.rsplit(" ", maxsplit=1)
            if kind == "gather":
                gathered.append(name)
            elif kind == "free":
                gathered.remove(name)
                assert after["params"][name] == Holding.SLICE.value
            held = {name for name, what in after["params"].items() if what != Holding.SLICE.value}
            assert held == set(gathered)
        assert gathered == []

    def test_zero1_begins_with_the_gathers_of_the_step_before_under_way(self, data: dict[str, Any]) -> None:
        case = case_of(data, "zero1")
        assert set(states_of(data, "zero1")[0]["params"].values()) == {Holding.ON_ITS_WAY.value}
        assert operations_of(data, "zero1")[case["flights"][0]] == "gather blocks.3"

    def test_a_collective_is_under_way_until_it_is_waited_for(self, data: dict[str, Any]) -> None:
        operations, flights = operations_of(data, "fsdp"), case_of(data, "fsdp")["flights"]
        assert flights[0] is None
        for operation, flight in zip(operations, flights[1:], strict=True):
            if operation.startswith(("gather", "reduce ")) and not operation.startswith("reduce flags"):
                assert operations[flight] == operation
            elif operation.startswith("wait"):
                assert flight is None or f"wait {operations[flight]}" != operation
        assert flights[-1] is None

    def test_strategies_are_at_the_same_computation_at_the_same_place(self, data: dict[str, Any]) -> None:
        computes = ("forward", "backward", "update")
        landmarks = [
            [
                (place, operation)
                for place, operation in zip(case["places"][1:], operations_of(data, case["name"]), strict=True)
                if operation.startswith(computes)
            ]
            for case in data["cases"]
        ]
        assert all(one == landmarks[0] for one in landmarks)
        for case in data["cases"]:
            assert case["places"][0] == 0.0
            assert sorted(set(case["places"])) == case["places"]
            assert case["places"][-1] <= 1.0

    def test_overrides_of_the_plan_are_in_the_picture(self, bench: Bench) -> None:
        spec = shipped("gpt-tiny")
        data = anatomy_data(made_bench(spec, bench=bench, num_ranks=2, **{"plan.overrides": {"blocks.0": "ddp"}}))
        assert data is not None
        assert dict(case_of(data, "fsdp")["units"]) == {
            ROOT: "SSS",
            "blocks.0": "RRR",
            **{f"blocks.{i}": "SSS" for i in (1, 2, 3)},
        }
        assert all(state["params"]["blocks.0"] == Holding.WHOLE.value for state in states_of(data, "fsdp"))
        assert data["left_out"] == []

    def test_a_hybrid_mesh_has_as_many_slices_as_its_shard_axis(self, bench: Bench) -> None:
        spec = shipped("gpt-tiny")
        data = anatomy_data(made_bench(spec, bench=bench, num_ranks=8, **{"plan.mesh": {"replicate": 2, "shard": 4}}))
        assert data is not None
        assert (data["num_ranks"], data["num_slices"], sorted(data["rings"])) == (8, 4, ["2", "4", "8"])
        assert any("over the 2 groups" in text for text in case_of(data, "fsdp")["captions"])
        assert data["left_out"] == []

    @pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "fsdp"])
    def test_on_a_hybrid_mesh_a_gradient_is_there_when_its_slice_has_crossed(self, bench: Bench, strategy: str) -> None:
        spec = shipped("gpt-tiny")
        made = made_bench(spec, bench=bench, num_ranks=4, **{"plan.mesh": {"replicate": 2, "shard": 2}})
        data = anatomy_data(made)
        assert data is not None
        states, flights = states_of(data, strategy), case_of(data, strategy)["flights"]
        operations = operations_of(data, strategy)
        for index, operation in enumerate(operations):
            kind, _, name = operation.rpartition(" ")
            after = states[index + 1]["grads"].get(name)
            if kind in ("reduce", "wait reduce", "reduce slice"):
                assert after == Holding.ON_ITS_WAY.value
            elif kind == "wait slice":
                assert after == Holding.SLICE.value
            if kind == "reduce slice":
                assert flights[index + 1] == index
        hybrid = Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=2))
        drawn = [
            {state: {name: held.value for name, held in frame.holds[state].items()} for state in STATES}
            for frame in snapshots_of(spec, plan=hybrid, num_ranks=4).snapshots
        ]
        assert states == drawn

    def test_a_hybrid_tape_from_before_slices_were_on_it_is_drawn(self, bench: Bench) -> None:
        spec = shipped("gpt-tiny")
        made = made_bench(spec, bench=bench, num_ranks=4, **{"plan.mesh": {"replicate": 2, "shard": 2}})
        cases = [replace(case, tape=tuple(one for one in case.tape if "slice" not in one.kind)) for case in made.cases]
        data = anatomy_data(replace(made, cases=tuple(cases)))
        assert data is not None
        assert data["left_out"] == []


class Test_a_tape_that_is_not_a_step:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_is_left_out_wherever_it_ends_early(self, bench: Bench, strategy: str) -> None:
        tape = tape_of(bench, strategy)
        for length in range(1, len(tape)):
            data = anatomy_data(with_tape(bench, strategy, tape[:length]))
            assert data is not None
            ((name, why),) = data["left_out"]
            assert name == strategy
            assert "\n" not in why
            assert data["cases"] == []

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"subject": "blocks.99"}, "which is none of the 5 units"),
            ({"kind": "teleport"}, "an operation 'teleport' that this Shardwise does not know"),
            ({"row": 10**6}, "is in row 1000000, which the ledger does not have"),
            ({"row": -1}, "is in row -1, which the ledger does not have"),
            ({"kind": "free"}, "forward blocks.0, of which the ranks hold: own slice"),
            ({"subject": "blocks.2"}, "wait gather blocks.2, of which the ranks hold: own slice"),
            ({"kind": "wait reduce"}, "wait reduce blocks.0, which is not being reduced"),
        ],
    )
    def test_is_left_out_where_it_contradicts_the_model(self, bench: Bench, change: dict[str, Any], why: str) -> None:
        tape = list(tape_of(bench, "fsdp"))
        index = next(i for i, one in enumerate(tape) if (one.kind, one.subject) == ("wait gather", "blocks.0"))
        tape[index] = replace(tape[index], **change)
        data = anatomy_data(with_tape(bench, "fsdp", tuple(tape)))
        assert data is not None
        ((name, found),) = data["left_out"]
        assert name == "fsdp"
        assert why in found

    @pytest.mark.parametrize("gone", ["reduce slice", "wait slice"])
    def test_is_left_out_where_a_slice_is_sent_or_waited_for_alone(self, bench: Bench, gone: str) -> None:
        spec = shipped("gpt-tiny")
        made = made_bench(spec, bench=bench, num_ranks=4, **{"plan.mesh": {"replicate": 2, "shard": 2}})
        tape = tuple(one for one in tape_of(made, "fsdp") if (one.kind, one.subject) != (gone, "blocks.0"))
        data = anatomy_data(with_tape(made, "fsdp", tape))
        assert data is not None
        assert [name for name, _ in data["left_out"]] == ["fsdp"]

    def test_is_left_out_where_it_frees_what_every_rank_has_to_hold(self, bench: Bench) -> None:
        """And gathers it again, so that all of it is there when it is used."""
        kinds = ("free", "gather", "wait gather")
        more = [Happening(kind=kind, subject="blocks.0", num_bytes=0, seconds=1.0, row=0) for kind in kinds]
        data = anatomy_data(with_tape(bench, "ddp", (*tape_of(bench, "ddp"), *more)))
        assert data is not None
        assert data["left_out"] == [["ddp", "the tape has free blocks.0, which every rank holds whole all the time"]]

    def test_does_not_take_the_others_with_it(self, bench: Bench) -> None:
        first, *others = bench.cases
        data = anatomy_data(replace(bench, cases=(replace(first, tape=first.tape[:3]), *others)))
        assert data is not None
        assert [name for name, _ in data["left_out"]] == [first.strategy]
        assert [case["name"] for case in data["cases"]] == [name for name in STRATEGIES if name != first.strategy]

    def test_leaves_nothing_where_nobody_recorded_any(self, bench: Bench) -> None:
        assert anatomy_data(replace(bench, cases=tuple(replace(case, tape=()) for case in bench.cases))) is None


class Test_memory:
    def test_is_the_highest_row_around_each_operation_where_a_ledger_has_only_rows(self, bench: Bench) -> None:
        spec = shipped("gpt-tiny")
        made = made_bench(spec, bench=bench, num_ranks=3)
        data = anatomy_data(made)
        assert data is not None
        for case, packed in zip(made.cases, data["cases"], strict=True):
            assert not packed["is_after"]
            rows = [0, *(one.row + 1 for one in case.tape)]
            for ledger, differences in zip(case.ledgers, packed["memory"], strict=True):
                entries = (ledger.at_rest, *ledger.entries)
                for frame, (row, after) in enumerate(itertools.pairwise([*rows, len(entries)])):
                    expected = max(entries[row : max(row + 1, after)], key=lambda entry: entry.total_bytes)
                    assert bytes_after(differences, frame) == expected.num_bytes

    def test_is_what_was_live_after_each_operation_where_that_was_recorded(self, bench: Bench) -> None:
        case = next(case for case in bench.cases if case.name == "fsdp")
        ledgers = tuple(
            replace(ledger, operations=tuple(LedgerEntry(at="", num_bytes={"params": at + rank}) for at, _ in tape))
            for rank, (ledger, tape) in enumerate((ledger, list(enumerate(case.tape))) for ledger in case.ledgers)
        )
        sizes = tuple(ledger.peak.total_bytes for ledger in ledgers)
        data = anatomy_data(replace(bench, cases=(replace(case, ledgers=ledgers, allocated_bytes=sizes),)))
        assert data is not None
        packed = data["cases"][0]
        assert packed["is_after"]
        for rank, differences in enumerate(packed["memory"]):
            assert bytes_after(differences, 0) == ledgers[rank].at_rest.num_bytes
            for at in range(len(case.tape)):
                assert bytes_after(differences, at + 1)["params"] == at + rank

    def test_has_the_peak_that_the_page_shows_for_the_case(self, bench: Bench) -> None:
        for extra in (0, 5000):
            for case in bench.cases:
                if not case.tape:
                    continue
                taller = replace(case, allocated_bytes=tuple(size + extra for size in case.allocated_bytes))
                data = anatomy_data(replace(bench, cases=(taller,)))
                assert data is not None
                packed = data["cases"][0]
                rank, curve = packed["curve"]
                assert (rank, max(curve)) == (taller.peak_rank, taller.peak_bytes)
                assert packed["peaks"] == list(taller.allocated_bytes)

    def test_of_the_fullest_rank_is_there_though_it_is_not_drawn(self, bench: Bench) -> None:
        case = bench.cases[0]
        sizes = [case.ledgers[0].peak.total_bytes] * 16
        sizes[11] += 4096
        large = replace(case, ledgers=(case.ledgers[0],) * 16, allocated_bytes=tuple(sizes))
        data = anatomy_data(replace(bench, num_ranks=16, cases=(large,)))
        assert data is not None
        assert 11 not in data["ranks"]
        rank, curve = data["cases"][0]["curve"]
        assert (rank, max(curve)) == (11, large.peak_bytes)

    @pytest.mark.parametrize(("grads", "words"), [(0, "are gone"), (1, "their buffer stays allocated")])
    def test_of_gradients_at_the_beginning_is_what_the_caption_says(self, bench: Bench, grads: int, words: str) -> None:
        case = bench.cases[0]
        resting = replace(case.ledgers[0].at_rest, num_bytes={**case.ledgers[0].at_rest.num_bytes, "grads": grads})
        ledgers = (replace(case.ledgers[0], at_rest=resting), *case.ledgers[1:])
        data = anatomy_data(replace(bench, cases=(replace(case, ledgers=ledgers),)))
        assert data is not None
        assert words in data["cases"][0]["captions"][0]

    def test_of_a_rank_with_other_rows_is_not_shown(self, bench: Bench) -> None:
        first = bench.cases[0]
        other = replace(first.ledgers[1], entries=first.ledgers[1].entries[1:])
        changed = replace(first, ledgers=(first.ledgers[0], other, *first.ledgers[2:3]))
        data = anatomy_data(replace(bench, cases=(changed,)))
        assert data is not None
        assert [rows is None for rows in data["cases"][0]["memory"]] == [False, True, False, True]


class Test_ring:
    def test_of_4_ranks_has_the_rounds_of_the_ring(self, data: dict[str, Any]) -> None:
        first, played = data["rings"]["4"]["all-reduce"]
        assert first == [[1 << rank] * 4 for rank in range(4)]
        for (part, sent, cells), round_ in zip(played, rounds(4), strict=True):
            assert (part, tuple(sent)) == (round_.part, round_.sent)
            summands = [[{rank for rank in range(4) if bits >> rank & 1} for bits in row] for row in cells]
            assert summands == [[set(cell) for cell in row] for row in round_.cells]
        assert played[-1][2] == [[0b1111] * 4] * 4

    def test_scatters_in_its_first_half_and_gathers_in_its_second(self, data: dict[str, Any]) -> None:
        ring = data["rings"]["4"]
        (_, reduced), (begins, gathered), (_, played) = (
            ring[name] for name in ("reduce-scatter", "all-gather", "all-reduce")
        )
        assert reduced == played[:3]
        assert [row[rank] for rank, row in enumerate(reduced[-1][2])] == [0b1111] * 4
        assert begins == [[0b1111 if chunk == rank else 0 for chunk in range(4)] for rank in range(4)]
        assert [round_[:2] for round_ in gathered] == [round_[:2] for round_ in played[3:]]
        for number, (_, _, cells) in enumerate(gathered, start=2):
            assert [row.count(0b1111) for row in cells] == [number] * 4

    @pytest.mark.parametrize(
        ("num_ranks", "drawn"), [(1, [0]), (8, list(range(8))), (9, [*range(7), 8]), (1024, [*range(7), 1023])]
    )
    def test_of_many_ranks_some_are_drawn(self, bench: Bench, num_ranks: int, drawn: list[int]) -> None:
        ledgers = (bench.cases[0].ledgers[0],) * num_ranks
        data = anatomy_data(replace(bench, num_ranks=num_ranks, cases=(replace(bench.cases[0], ledgers=ledgers),)))
        assert data is not None
        assert data["ranks"] == drawn
        assert len(data["cases"][0]["memory"]) == len(drawn)
        assert data["rings"][str(num_ranks)]["num_ranks"] == min(num_ranks, 8)


def test_twelve_layers_of_all_strategies_on_8_ranks_stay_below_400_kb(bench: Bench) -> None:
    spec = shipped("gpt2-124m")
    data = anatomy_data(made_bench(spec, bench=bench, num_ranks=8))
    assert data is not None
    assert len(data["cases"]) == len(STRATEGIES)
    assert len(json.dumps(data, separators=(",", ":"))) < 400_000


@pytest.mark.parametrize("placement", STRATEGIES.values(), ids=list(STRATEGIES))
def test_every_kind_of_operation_has_a_caption(placement: Placement) -> None:
    texts = [caption(kind, placement=placement, trained=True, mesh=Mesh(shard=4)) for kind in Kind]
    assert all(text.endswith(".") for text in texts)
    assert len(set(texts)) == len(Kind)


def test_nothing_in_the_markup_needs_a_looser_policy() -> None:
    """No styles or handlers in attributes, nothing from elsewhere, and no text that a script would parse as markup."""
    assert not re.search(r"\s(style|on\w+|href|src)=|<script|<style", asset("anatomy.html"))
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "fetch(", 'setAttribute("style"', "http:"):
        assert forbidden not in SCRIPT.replace("http://www.w3.org/2000/svg", ""), forbidden
    assert "</script" not in SCRIPT
    assert "</style" not in STYLE
    assert "@import" not in STYLE
