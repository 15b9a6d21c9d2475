"""docs/claims.md is what `python benchmarks/claims.py` writes now, and its verdicts follow from numbers."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("claims")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("claims", "claim_rows", "measuring", "rows"):
            sys.modules.pop(name)


def run_body(rank: int, name: str) -> Any:
    """A body of benchmarks/claim_rows, which ranks of the tests cannot import by themselves."""
    sys.path.insert(0, BENCHMARKS)
    try:
        return getattr(importlib.import_module("claim_rows.step_claims"), name)(rank)
    finally:
        sys.path.remove(BENCHMARKS)


def on_test_ranks(body: Any, *, num_ranks: int) -> list[Any]:
    return run_ranks(run_body, num_ranks=num_ranks, args=(body.__name__,))


def test_the_page_is_what_the_command_writes(claims: ModuleType) -> None:
    page = claims.page([row.run() for row in claims.rows(on_test_ranks)])
    assert page == claims.PAGE.read_text(), "docs/claims.md is old: run `python benchmarks/claims.py`"


def test_a_verdict_follows_from_its_checks(claims: ModuleType) -> None:
    claim = importlib.import_module("claim_rows.claim")

    def verdict(**held: bool) -> str:
        checks = [claim.Check(when=when, holds=holds) for when, holds in held.items()]
        return str(claim.Claim(said="", number="", checks=checks, head=("",), rows=[], source="").verdict)

    assert verdict(a=True, b=True) == "holds"
    assert verdict(a=False, b=False) == "does not hold"
    assert verdict(a=True, b=False) == "holds when a"
    assert verdict(a=True, b=False, c=True) == "holds when a, and when c"
