"""Which case to use: the fastest, or the simplest of those that cannot be told apart from it."""

from dataclasses import replace

from shardwise.bench.recommendation import choose, recommended
from shardwise.bench.results import Bench, CaseResult, Difference, Equivalence, Spread

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


class TestChoice:
    def test_the_fastest_wins_beyond_the_spread(self) -> None:
        assert choose([case("ddp", 1.0, 1.1, 1.2), case("fsdp", 0.7, 0.8, 0.9)]).name == "fsdp"

    def test_the_simpler_wins_within_the_spread(self) -> None:
        cases = [case("fsdp", 0.9, 1.0, 1.1), case("zero1", 0.95, 1.05, 1.2), case("zero2", 0.95, 1.05, 1.15)]
        assert choose(cases).name == "zero1"

    def test_the_simpler_wins_where_a_steady_one_is_hardly_faster(self) -> None:
        assert choose([case("ddp", 1.02, 1.02), case("fsdp", 1.0, 1.0)]).strategy == "ddp"
        assert choose([case("ddp", 1.04, 1.04), case("fsdp", 1.0, 1.0)]).strategy == "fsdp"

    def test_one_stray_value_makes_no_spread(self) -> None:
        steady = case("fsdp", 0.7, 0.71, 0.72, 0.73)
        assert choose([case("ddp", 1.0, 1.01, 1.02, 0.6), steady]) is steady

    def test_another_engine_wins_only_beyond_the_spread(self) -> None:
        ours = case("fsdp", 1.0, 1.1, 1.2)
        assert choose([ours, case("ddp", 0.95, 1.05, 1.15, engine="torch")]) is ours
        assert choose([ours, case("ddp", 0.5, 0.6, 0.7, engine="torch")]).name == "torch ddp"

    def test_of_ours_the_eager_one_wins_within_the_spread_and_ours_before_theirs(self) -> None:
        eager, captured = case("ddp", 1.0, 1.1), case("ddp", 0.99, 1.09, engine="captured")
        assert choose([captured, eager]) is eager
        theirs = case("ddp", 0.98, 1.08, engine="torch-captured")
        assert choose([theirs, captured]) is captured
        assert choose([captured, case("ddp", 0.5, 0.6, engine="compiled")]).engine == "compiled"


class TestWords:
    def test_captured_is_compared_with_captured_and_eager_with_eager(self) -> None:
        eager = (case("fsdp", 0.02), case("fsdp", 0.016, engine="torch"))
        captured = (case("fsdp", 0.01, engine="captured"), case("fsdp", 0.0125, engine="torch-captured"))
        assert "Use captured fsdp: 800 samples/s, 1.25 times as fast as torch-captured fsdp" in why(*eager, *captured)
        assert "1.25 times as fast as fsdp" in why(*eager)
        assert "1.60 times as fast as torch fsdp, which is eager" in why(*eager, captured[0])

    def test_speed_beside_the_next_one_and_who_holds_less(self) -> None:
        found = recommended(bench(case("ddp", 0.01, peak_mib=34), case("fsdp", 0.0121, peak_mib=12.1)))
        assert found.recommended == 0
        assert found.why == (
            "Use ddp: 800 samples/s, 1.21 times as fast as fsdp. "
            "If memory is tight: fsdp peaks at 12.1 MiB per rank, 2.8 times less, at 661 samples/s."
        )

    def test_one_sentence_where_nothing_holds_less(self) -> None:
        found = recommended(bench(case("ddp", 0.01), case("fsdp", 0.02), capacity_bytes=20 * 2**30))
        assert found.why == (
            "Use ddp: 800 samples/s, 2.00 times as fast as fsdp, and its peak of 10.0 MiB per rank fits the device's "
            "20.0 GiB."
        )

    def test_what_is_simpler_and_as_fast_says_so(self) -> None:
        found = recommended(bench(case("ddp", 0.9, 1.0, 1.1), case("fsdp", 0.8, 0.95, 1.1)))
        assert found.why == "Use ddp: 8 samples/s, about as fast as fsdp, and simpler."

    def test_of_equals_in_memory_the_simpler_is_named(self) -> None:
        found = recommended(
            bench(
                case("ddp", 0.01, peak_mib=30),
                case("fsdp", 0.03, peak_mib=10.1),
                case("fsdp", 0.02, peak_mib=10.0, engine="torch"),
            )
        )
        assert "tight: fsdp peaks at 10.1 MiB" in found.why


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
