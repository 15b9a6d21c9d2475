"""Patterns that name some of many units, and no other."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planner.search.dial import name_patterns

BLOCKS = [f"blocks.{number}" for number in range(126)]


@given(st.sets(st.sampled_from(BLOCKS), min_size=1))
def test_patterns_match_the_names_that_are_meant_and_no_other(chosen: set[str]) -> None:
    named = [name for name in BLOCKS if name in chosen]
    patterns = name_patterns(named, among=BLOCKS)
    assert {name for name in BLOCKS if any(fnmatchcase(name, pattern) for pattern in patterns)} == chosen


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (BLOCKS[:9], ["blocks.[0-8]"]),
        (BLOCKS[9:32], ["blocks.9", "blocks.[1-2][0-9]", "blocks.3[0-1]"]),
        (["(root)"], ["(root)"]),
        (["head", "layer1.0"], ["head", "layer1.0"]),
    ],
)
def test_rows_of_blocks_are_few_patterns(names: list[str], patterns: list[str]) -> None:
    assert name_patterns(names, among=[*BLOCKS, "(root)", "head", "layer1.0", "layer2.0"]) == patterns
