"""Collectives of several ranks, as `shardwise calibrate --ranks` measures them."""

from typing import Any

import torch
from ranks import run_ranks

from shardwise.hardware.measuring.fit import fit_link
from shardwise.hardware.measuring.measure_ranks import collective_rows


def measure(rank: int) -> list[dict[str, Any]]:
    return list(collective_rows(torch.device("cpu"), largest_bytes=2**16))


def test_every_rank_gets_the_slowest_ones_seconds_of_every_collective_and_size() -> None:
    first, second = run_ranks(measure, num_ranks=2)
    assert first == second
    assert {row["name"] for row in first} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert sorted({row["num_bytes"] for row in first}) == [2**12, 2**14, 2**16]
    assert all(row["seconds"] > 0 and row["num_ranks"] == 2 for row in first)
    link = fit_link(first, source="a test")
    assert link is not None
    assert min(number["value"] for number in link.values()) > 0
