"""A bench on the terminal."""

from dataclasses import replace

import pytest
from measure.report.sample_bench import sample_bench
from rich.console import Console

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.measure.bench.recommendation import recommended
from shardwise.measure.bench.results import Bench, Difference, Equivalence
from shardwise.measure.bench.spread import Spread
from shardwise.measure.report.text.comparison import as_table, baseline, columns, heading, peak_table, remarks, row


@pytest.fixture(scope="module")
def bench() -> Bench:
    return recommended(sample_bench())


def refused(bench: Bench, *, count: int = 1) -> Bench:
    differences = tuple(Difference(case="zero2", text=f"zero2: wrong {number}", excess=9.0) for number in range(count))
    return recommended(replace(bench, equivalence=Equivalence(differences=differences, largest=9.0)))


def lines_of(bench: Bench, *, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(as_table(bench))
    return [line.rstrip() for line in capture.get().splitlines()]


class TestPeaks:
    def shown(self, bench: Bench) -> dict[str, dict[str, float]]:
        """Case → column → number, as a reader sees them."""
        console = Console(width=80)
        with console.capture() as capture:
            console.print(peak_table(bench))
        _, heads, *lines = capture.get().splitlines()
        assert max(map(len, lines)) <= 80
        names = heads.split()[3:]
        assert names == ["peak", *CATEGORIES]
        rows = [line.rsplit(maxsplit=len(names)) for line in lines]
        return {row[0]: dict(zip(names, map(float, row[1:]), strict=True)) for row in rows}

    def test_categories_add_up_to_the_peak_of_the_other_table_in_every_case(self, bench: Bench) -> None:
        shown = self.shown(bench)
        ran = [case for case in bench.cases if case.ran]
        assert list(shown) == [case.name for case in ran]
        for case in ran:
            columns = shown[case.name]
            assert columns["peak"] == pytest.approx(case.peak_bytes / 2**20, abs=0.005)
            # Each number is rounded to two places.
            assert sum(columns[name] for name in CATEGORIES) == pytest.approx(columns["peak"], abs=0.005 * 8)
            assert f"{columns['peak']:.2f}" == row(bench, case)[-4]

    def test_what_is_sharded_is_a_quarter_on_four_ranks(self, bench: Bench) -> None:
        held = self.shown(bench)
        for strategy, names in {"zero1": ["optim"], "fsdp": ["params", "optim"]}.items():
            for name in names:
                assert held[strategy][name] == pytest.approx(held["ddp"][name] / 4, abs=0.01)

    def test_where_nobody_looked_there_is_none(self, bench: Bench) -> None:
        cases = tuple(replace(case, ledgers=()) for case in bench.cases)
        assert peak_table(replace(bench, cases=cases)) is None


class TestTable:
    def test_a_row_a_case_that_ran_in_80_columns(self, bench: Bench) -> None:
        lines = lines_of(bench)
        rows = [line.split() for line in lines[2:]]
        assert [case.name for case in bench.cases if case.ran] == [" ".join(words[: len(words) - 10]) for words in rows]
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)

    def test_the_numbers_are_those_of_the_bench(self, bench: Bench) -> None:
        first = bench.cases[0]
        assert first.step_seconds is not None
        words = lines_of(bench)[2].split()
        tokens = bench.tokens_per_s(first)
        assert tokens is not None
        assert words[:6] == ["ddp", "eager", f"{tokens:,.0f}", "5%", "1.00", f"{first.step_seconds.median * 1000:.2f}"]
        assert words[6] == f"{first.exposed_seconds / first.seconds:.0%}"
        assert words[7] == f"{first.peak_bytes / 2**20:.2f}"
        assert words[8] == "+0.0%"

    def test_long_names_of_engines_still_fit(self, bench: Bench) -> None:
        ours = [case for case in bench.cases if case.engine == "shardwise"]
        cases = [replace(case, engine=engine) for engine in ("accelerate", "megatron-fsdp-captured") for case in ours]
        lines = lines_of(replace(bench, cases=(*bench.cases, *cases), recommended=None))
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)
        assert any("accelerate" in line for line in lines)
        assert any("megatron-fsdp" in line for line in lines)

    def test_every_row_says_how_its_steps_were_run(self, bench: Bench) -> None:
        engines = ("shardwise", "captured", "torch-captured", "torch-compiled")
        cases = tuple(replace(bench.cases[0], engine=engine) for engine in engines)
        rows = [line.split() for line in lines_of(replace(bench, cases=cases, recommended=None))[2:]]
        assert [words[: len(words) - 9] for words in rows] == [
            ["ddp", "eager"],
            ["ddp", "captured"],
            ["torch", "ddp", "captured"],
            ["torch", "ddp", "compiled"],
        ]

    def test_what_is_not_known_is_a_question_mark(self, bench: Bench) -> None:
        bare = replace(
            bench.cases[0],
            predicted=None,
            silent_seconds=None,
            allocated_bytes=(),
            sent_bytes=None,
            ledgers=(),
            tape=(),
        )
        assert lines_of(replace(bench, cases=(bare,), step_tokens=None))[2].split().count("?") == 4

    def test_exposed_communication_that_is_noise_is_not_called_0(self, bench: Bench) -> None:
        first = bench.cases[0]
        assert first.step_seconds is not None
        for values in (tuple(2 * one for one in first.step_seconds.values), first.step_seconds.values):
            noisy = replace(bench, cases=(replace(first, silent_seconds=Spread(values=values), tape=()),))
            assert lines_of(noisy)[2].split()[6] == "n/m"
            assert any(line.startswith("n/m: not measurable here") for line in remarks(noisy))
        assert not any("n/m" in line for line in remarks(bench))

    def test_exposed_communication_by_difference_is_said(self, bench: Bench) -> None:
        by = "by the time of a step without communication"
        assert any(f"(of torch ddp, torch fsdp {by})" in line for line in remarks(bench))
        taped = tuple(case for case in bench.cases if case.tape)
        assert not any(by in line for line in remarks(replace(bench, cases=taped)))

    def test_of_one_block_no_spread_is_shown(self, bench: Bench) -> None:
        once = replace(bench.cases[0], step_seconds=Spread(values=(0.05,)))
        assert lines_of(replace(bench, cases=(once,)))[2].split()[3] == "?"

    def test_samples_where_there_are_no_tokens_and_gib_where_there_is_much(self, bench: Bench) -> None:
        large = replace(bench.cases[0], allocated_bytes=(90 * 2**30,))
        heads = columns(replace(bench, cases=(large,), step_tokens=None))
        assert "samples\nper s" in heads
        assert "peak\nGiB" in heads

    def test_a_bench_that_is_refused_shows_no_ratio(self, bench: Bench) -> None:
        assert "×" in columns(bench)
        assert "×" not in columns(refused(bench))
        assert len(lines_of(refused(bench))[2].split()) == len(lines_of(bench)[2].split()) - 1

    def test_speed_is_relative_to_our_ddp_or_what_ran_first(self, bench: Bench) -> None:
        assert baseline(bench).name == "ddp"
        assert baseline(replace(bench, cases=bench.cases[2:])).name == "zero2"


class TestRemarks:
    def test_why_a_case_did_not_run_the_verdict_and_the_recommendation(self, bench: Bench) -> None:
        _, missing, verdict, why = remarks(bench)
        assert missing == "lightning zero1: did not run: lightning has no zero1"
        assert verdict == "Same training: all 7 agree; the largest difference is 12% of the rounding tolerance."
        assert why == bench.why
        assert why.startswith("Use ddp: ")

    def test_a_refusal_names_the_differences_and_recommends_nothing(self, bench: Bench) -> None:
        told = list(remarks(refused(bench, count=12)))
        assert "NOT the same training, so nothing is ranked:" in told
        assert "  zero2: wrong 0" in told
        assert told[-1] == "  and 4 more"
        assert not any("Use " in line for line in told)

    def test_two_cases_are_both(self, bench: Bench) -> None:
        two = replace(bench, cases=bench.cases[:2], equivalence=Equivalence(differences=(), largest=0.0))
        assert "Same training: both agree; the largest difference is 0." in list(remarks(two))

    def test_a_bench_in_which_nothing_ran_has_no_table(self, bench: Bench) -> None:
        nothing = recommended(replace(bench, cases=bench.cases[-1:]))
        assert list(remarks(nothing)) == ["lightning zero1: did not run: lightning has no zero1", "Nothing ran."]


def test_the_heading_says_what_was_run_where(bench: Bench) -> None:
    assert heading(replace(bench, name="<b>")).startswith("<b>: gpt-tiny, fp32, 8 samples per step, on 4 × cpu")
