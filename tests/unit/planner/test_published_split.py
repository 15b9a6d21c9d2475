"""The split of published rows: which may be fitted to, and which only check."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.plan import Plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("published_rows")
    sys.modules.pop("published_rows")


def _row(rows: ModuleType, micro_batch: int = 1) -> object:
    plan = Plan(micro_batch=micro_batch)
    return rows.Row(table="T", model="m", cluster="2x8xa100@ib-8x200", plan=plan, optimizer="adamw", per_s=1.0)


def test_about_half_of_all_trainings_are_held_out(rows: ModuleType) -> None:
    held = sum(_row(rows, micro_batch=size).is_held_out for size in range(1, 401))  # type: ignore[attr-defined]
    assert 160 < held < 240


def test_what_was_measured_and_what_is_assumed_do_not_move_a_row(rows: ModuleType) -> None:
    for size in range(1, 20):
        row = _row(rows, micro_batch=size)
        other = replace(row, per_s=2.0, cluster="2x8xa100@roce-8x100", software="2023", system="x")  # type: ignore[type-var]
        assert row.is_held_out == other.is_held_out  # type: ignore[attr-defined]


def test_a_row_that_is_read_in_another_way_stays_in_its_half(rows: ModuleType) -> None:
    for size in range(1, 20):
        row = _row(rows, micro_batch=size)
        plan = Plan(micro_batch=size, recompute="full")
        other = replace(row, model="python:other.py:model", length=7, plan=plan, split_as=("m", None, "none"))  # type: ignore[type-var]
        assert row.is_held_out == other.is_held_out  # type: ignore[attr-defined]


def test_the_split_is_the_one_that_was_there_before_anything_was_fitted(rows: ModuleType) -> None:
    held = [size for size in range(1, 17) if _row(rows, micro_batch=size).is_held_out]  # type: ignore[attr-defined]
    assert held == [1, 6, 7, 8, 9, 10, 11, 12, 13, 15]
