"""Which case to use: the fastest, or the simplest of those that cannot be told apart from it."""

import itertools
from dataclasses import replace

import pytest

from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.recommendation import is_simpler, recommended
from shardwise.measure.bench.results import Bench, Difference, Equivalence
from shardwise.measure.bench.spread import SpeedRelation, Spread, relation
from shardwise.plan.placement import AUTO, STRATEGIES

MIB = 2**20


def case(strategy: str, *seconds: float, engine: str = "shardwise", peak_mib: float = 10.0) -> CaseResult:
    return CaseResult(
        engine=engine,
        strategy=strategy,
        losses=(1.0,),
        step_seconds=Spread(values=seconds),
        allocated_bytes=(round(peak_mib * MIB),),
    )


def bench(*cases: CaseResult, differences: tuple[Difference, ...] = (), capacity_bytes: int | None = None) -> Bench:
    return Bench(
        name="n",
        command="c",
        made="m",
        num_ranks=2,
        step_samples=8,
        step_tokens=None,
        settings={},
        machine={},
        cases=cases,
        equivalence=Equivalence(differences=differences, largest=0.1),
        capacity_bytes=capacity_bytes,
    )


def why(*cases: CaseResult) -> str:
    return recommended(bench(*cases)).why


def choose(*cases: CaseResult) -> str | None:
    found = recommended(bench(*cases))
    return None if found.recommended is None else found.cases[found.recommended].name


class TestChoice:
    def test_the_fastest_wins_beyond_the_spread(self) -> None:
        assert choose(case("ddp", 1.0, 1.1, 1.2), case("fsdp", 0.7, 0.8, 0.9)) == "fsdp"

    def test_the_simpler_wins_within_the_spread(self) -> None:
        cases = [case("fsdp", 0.9, 1.0, 1.1), case("zero1", 0.95, 1.05, 1.2), case("zero2", 0.95, 1.05, 1.15)]
        assert choose(*cases) == "zero1"

    def test_the_simpler_wins_where_a_steady_one_is_hardly_faster(self) -> None:
        assert choose(case("ddp", 1.02, 1.02), case("fsdp", 1.0, 1.0)) == "ddp"
        assert choose(case("ddp", 1.04, 1.04), case("fsdp", 1.0, 1.0)) == "fsdp"

    def test_one_stray_value_makes_no_spread(self) -> None:
        assert choose(case("ddp", 1.0, 1.01, 1.02, 0.6), case("fsdp", 0.7, 0.71, 0.72, 0.73)) == "fsdp"

    @pytest.mark.parametrize("engine", ["torch", "accelerate", "lightning"])
    @pytest.mark.parametrize("ours", [0.99, 1.0, 1.01])
    def test_of_engines_about_as_fast_the_shorter_step_wins_whoever_made_it(self, engine: str, ours: float) -> None:
        expected = "ddp" if ours < 1.0 else f"{engine} ddp"
        theirs = case("ddp", 1.0, 1.0, engine=engine)
        mine = case("ddp", ours, ours)
        assert choose(theirs, mine) == expected
        if ours != 1.0:
            assert choose(mine, theirs) == expected

    def test_swapping_the_engines_swaps_the_choice(self) -> None:
        """What is said of one engine would be said of the other with the same numbers."""
        times = {"shardwise": (1.0, 1.02, 1.04), "torch": (0.7, 0.72, 0.74)}
        for strategies in (("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")):
            for spread in (1.0, 1.4):
                seconds = {name: [one * spread**at for at, one in enumerate(values)] for name, values in times.items()}
                here = [case(s, *seconds[e], engine=e) for e, s in zip(times, strategies, strict=True)]
                there = [replace(one, engine={"shardwise": "torch", "torch": "shardwise"}[one.engine]) for one in here]
                found, swapped = recommended(bench(*here)), recommended(bench(*there))
                assert found.recommended == swapped.recommended

    def test_eager_wins_over_captured_within_the_spread(self) -> None:
        eager, captured = case("ddp", 1.0, 1.02), case("ddp", 0.99, 1.01, engine="captured")
        assert choose(captured, eager) == "ddp"
        assert choose(captured, case("ddp", 0.5, 0.6, engine="compiled")) == "compiled ddp"
        assert choose(case("ddp", 0.98, 1.0, engine="torch-captured"), eager) == "ddp"

    def test_simpler_is_fewer_parts_and_none_more(self) -> None:
        eager_fsdp, captured_ddp = case("fsdp", 1.0), case("ddp", 1.0, engine="captured")
        assert not is_simpler(captured_ddp, eager_fsdp)
        assert not is_simpler(eager_fsdp, captured_ddp)
        assert not is_simpler(case("ddp", 1.0), case("ddp", 1.0, engine="torch"))
        order = [case(strategy, 1.0) for strategy in (*STRATEGIES, AUTO)]
        assert all(is_simpler(one, other) for one, other in itertools.pairwise(order))


class TestNoise:
    def test_engines_whose_times_spread_by_39_percent_are_not_ranked(self) -> None:
        ours, theirs = case("ddp", 0.61, 0.61, 1.0, 1.39, 1.39), case("ddp", 0.9, 1.1, 1.3, engine="torch")
        found = recommended(bench(ours, theirs))
        assert found.recommended is None
        assert found.why == (
            "Too noisy to rank: the step times of ddp (±39%) and torch ddp (±9%) overlap. Run more rounds (--rounds), "
            "or on a quieter machine. Least memory: ddp peaks at 10.0 MiB per rank, at 8 samples/s."
        )

    def test_a_wide_spread_is_no_obstacle_where_nothing_overlaps(self) -> None:
        assert choose(case("ddp", 0.61, 1.0, 1.39), case("ddp", 3.0, 3.1, engine="torch")) == "ddp"

    def test_what_another_clearly_beats_is_not_used_though_the_fastest_is_too_noisy_to_beat_it(self) -> None:
        """As measured on a busy machine: the shortest median had the widest spread."""
        noisy, steady = case("zero2", 0.06, 0.08, 0.26), case("fsdp", 0.085, 0.088, 0.092)
        assert choose(case("ddp", 0.13, 0.143, 0.16), noisy, steady) == "zero2"
        assert choose(case("ddp", 0.13, 0.143, 0.16), steady) == "fsdp"

    def test_the_simplest_of_those_that_cannot_be_ranked_is_used_and_said_to_be_unranked(self) -> None:
        assert why(case("ddp", 0.61, 1.0, 1.39), case("fsdp", 0.7, 0.9, 1.1)) == (
            "Use ddp: 8 samples/s, too noisy to rank against fsdp (±20% and ±11%), and simpler: no sharded optimizer "
            "state, sharded gradients, sharded parameters or second gather."
        )

    @pytest.mark.parametrize(
        ("one", "other", "expected"),
        [
            ((1.0, 1.0), (1.04, 1.04), SpeedRelation.APART),
            ((1.0, 1.0), (1.02, 1.02), SpeedRelation.ALIKE),
            ((0.98, 1.0, 1.02), (1.0, 1.02, 1.04), SpeedRelation.ALIKE),
            ((0.8, 1.0, 1.2), (0.9, 1.2, 1.5), SpeedRelation.NOISY),
            ((0.61, 1.0, 1.39), (1.0, 1.0), SpeedRelation.NOISY),
        ],
    )
    def test_ranges_that_overlap_cannot_be_ranked(
        self, one: tuple[float, ...], other: tuple[float, ...], expected: SpeedRelation
    ) -> None:
        assert relation(Spread(values=one), Spread(values=other)) is expected
        assert relation(Spread(values=other), Spread(values=one)) is expected

    def test_of_one_value_no_spread_is_known(self) -> None:
        assert Spread(values=(1.0,)).off is None
        assert Spread(values=(0.61, 1.0, 1.39)).off == pytest.approx(0.195)


class TestWords:
    def test_captured_is_compared_with_captured_and_eager_with_eager(self) -> None:
        eager = (case("fsdp", 0.02), case("fsdp", 0.016, engine="torch"))
        captured = (case("fsdp", 0.01, engine="captured"), case("fsdp", 0.0125, engine="torch-captured"))
        assert "Use captured fsdp: 800 samples/s, 1.25 times as fast as torch-captured fsdp" in why(*eager, *captured)
        assert "1.25 times as fast as fsdp" in why(*eager)
        assert "1.60 times as fast as torch fsdp, which is eager" in why(*eager, captured[0])

    def test_speed_compared_with_the_next_one_and_who_holds_less(self) -> None:
        found = recommended(bench(case("ddp", 0.01, peak_mib=34), case("fsdp", 0.0121, peak_mib=12.1)))
        assert found.recommended == 0
        assert found.why == (
            "Use ddp: 800 samples/s, 1.21 times as fast as fsdp. "
            "If memory is tight: fsdp peaks at 12.1 MiB per rank, 36% as much, at 661 samples/s."
        )

    @pytest.mark.parametrize(("peak_mib", "words"), [(17.0, "half as much"), (11.3, "a third"), (8.5, "a quarter")])
    def test_a_round_share_is_said_in_words(self, peak_mib: float, words: str) -> None:
        assert words in why(case("ddp", 0.01, peak_mib=34), case("fsdp", 0.02, peak_mib=peak_mib))

    def test_one_sentence_where_nothing_holds_less(self) -> None:
        found = recommended(bench(case("ddp", 0.01), case("fsdp", 0.02), capacity_bytes=20 * 2**30))
        assert found.why == (
            "Use ddp: 800 samples/s, 2.00 times as fast as fsdp; its peak of 10.0 MiB per rank fits the device's "
            "20.0 GiB."
        )

    def test_what_is_simpler_says_which_parts_it_lacks(self) -> None:
        assert why(case("ddp", 1.0, 1.0), case("zero1", 0.99, 0.99)) == (
            "Use ddp: 8 samples/s, about as fast as zero1, and simpler: no sharded optimizer state."
        )
        assert why(case("ddp", 1.0, 1.0), case("ddp", 0.99, 0.99, engine="compiled")) == (
            "Use ddp: 8 samples/s, about as fast as compiled ddp, which is compiled, and simpler: no CUDA graph or "
            "compiler."
        )

    def test_of_equals_in_memory_the_faster_is_named_whoever_made_it(self) -> None:
        found = recommended(
            bench(
                case("ddp", 0.01, peak_mib=30),
                case("fsdp", 0.03, peak_mib=10.0),
                case("fsdp", 0.02, peak_mib=10.1, engine="torch"),
            )
        )
        assert "tight: torch fsdp peaks at 10.1 MiB" in found.why


def test_cases_that_did_not_do_the_same_training_are_not_ranked() -> None:
    found = recommended(
        bench(case("ddp", 1.0), case("fsdp", 2.0), differences=(Difference(case="fsdp", text="t", excess=9.0),))
    )
    assert found.recommended is None
    assert found.why == "Not ranked: not all did the same training (fsdp)."


def test_where_one_ran_it_is_the_one() -> None:
    failed = CaseResult(engine="shardwise", strategy="ddp", why_not="rank 0: out of memory")
    found = recommended(bench(failed, case("fsdp", 2.0)))
    assert found.recommended == 1
    assert found.why == "Use fsdp: 4 samples/s, the only one that ran."
    none = recommended(bench(failed))
    assert (none.recommended, none.why) == (None, "Nothing ran.")


def test_the_recommendation_is_part_of_the_bench() -> None:
    found = recommended(bench(case("ddp", 1.0)))
    assert replace(found, recommended=None, why="") == bench(case("ddp", 1.0))
