"""benchmarks/memory_cases.py: what is measured tells of every two levels together, and soon."""

from itertools import combinations, pairwise, product
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.models.catalogue import CATALOGUE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import memory_cases

    return memory_cases


def test_there_are_enough_cases_and_none_twice(script: ModuleType) -> None:
    cases = script.all_cases(script.LARGE)
    assert len(cases) >= 80
    assert len(set(cases)) == len(cases)
    assert {case.model for case in cases} <= set(CATALOGUE)
    assert {case.optimizer for case in cases} == {"adamw-fused", "adamw-foreach", "sgd"}


@pytest.mark.parametrize("models", ["LARGE", "SMALL"])
def test_every_two_levels_meet(script: ModuleType, models: str) -> None:
    cases = script.all_cases(getattr(script, models))
    ours = [case.as_data() for case in cases if case.engine == "shardwise"]
    for one, other in combinations(script.FACTORS, 2):
        levels = [{case[factor] for case in ours} for factor in (one, other)]
        assert {(case[one], case[other]) for case in ours} == set(product(*levels)), f"{one} with {other}"


def test_the_first_half_alone_has_every_model_strategy_and_number_of_ranks(script: ModuleType) -> None:
    cases = script.all_cases(script.LARGE)
    half = cases[: len(cases) // 2]
    for factor in ("model", "strategy", "num_ranks", "precision", "recompute", "engine"):
        assert {getattr(case, factor) for case in half} == {getattr(case, factor) for case in cases}, factor


def test_every_case_of_torchs_engine_is_one_of_ours_too(script: ModuleType) -> None:
    cases = [case.as_data() for case in script.all_cases(script.LARGE)]
    ours = [case | {"engine": ""} for case in cases if case["engine"] == "shardwise"]
    torchs = [case | {"engine": ""} for case in cases if case["engine"] == "torch"]
    assert len(torchs) == script.NUM_TORCHS
    assert all(case in ours for case in torchs)


def test_processes_change_few_times(script: ModuleType) -> None:
    """Each change costs seconds, in which nothing is measured."""
    ranks = [case.num_ranks for case in script.all_cases(script.LARGE)]
    changes = sum(before != after for before, after in pairwise(ranks))
    assert changes == 2 * len(script.NUM_RANKS) - 1
