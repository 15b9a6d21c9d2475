"""Collectives by latency and bandwidth: what the formulas must give, and how meshes lie on nodes."""

import pytest

from shardwise.hardware import cluster_of
from shardwise.plan.placement import Mesh
from shardwise.planner.time.collective import PROTOCOLS, Ring, can_link, rings_of

GIB = 2**30
NVLINK = Ring(num_ranks=8, bytes_per_s=200e9, hop_seconds=3e-6)


def test_a_large_gather_takes_what_the_wire_takes() -> None:
    assert NVLINK.gather_seconds(8 * GIB) == pytest.approx(7 * GIB / 200e9, rel=0.01)


def test_a_small_gather_takes_as_long_as_an_empty_one() -> None:
    hops = min(one.base_seconds + 7 * one.hop * 3e-6 for one in PROTOCOLS)
    assert NVLINK.gather_seconds(1024) == pytest.approx(hops, rel=0.01)


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather() -> None:
    both = 2 * NVLINK.gather_seconds(GIB)
    assert NVLINK.all_reduce_seconds(GIB) == pytest.approx(both, rel=0.01)


def test_one_rank_sends_nothing() -> None:
    alone = Ring(num_ranks=1)
    assert alone.gather_seconds(GIB) == alone.all_reduce_seconds(GIB) == 0.0


def test_over_many_nodes_a_small_all_reduce_goes_up_a_tree() -> None:
    ring = Ring(num_ranks=1024, num_nodes=128, bytes_per_s=200e9, hop_seconds=3e-6, node_hop_seconds=14e-6)
    around = 2 * 127 * 14e-6 * min(one.hop for one in PROTOCOLS)
    assert ring.all_reduce_seconds(1024) < around / 5
    assert ring.gather_seconds(1024) > around / 2


def test_more_ranks_never_make_a_collective_faster() -> None:
    rings = [rings_of(Mesh(shard=8 * n), cluster=cluster_of(f"{n}x8xh100-80gb")).world for n in (2, 4, 16, 256, 2048)]
    for num_bytes in (2**10, 2**24, 2**30):
        gathers = [ring.gather_seconds(num_bytes) for ring in rings]
        assert gathers == sorted(gathers)


def test_a_shard_group_within_a_node_does_not_use_the_fabric() -> None:
    slow = rings_of(Mesh(replicate=4, shard=8), cluster=cluster_of("4x8xh100-80gb@eth-10"))
    assert slow.shard == rings_of(Mesh(shard=8), cluster=cluster_of("8xh100-80gb")).shard
    assert (slow.replicate.num_ranks, slow.replicate.num_nodes) == (4, 4)


def test_groups_that_leave_a_node_share_its_fabric() -> None:
    cluster = cluster_of("4x8xh100-80gb@ib-8x200")
    alone, shared = (
        rings_of(Mesh(shard=32), cluster=cluster).shard,
        rings_of(Mesh(replicate=4, shard=8), cluster=cluster),
    )
    assert alone.bytes_per_s == pytest.approx(8 * 23.5e9)
    assert shared.replicate.bytes_per_s == pytest.approx(23.5e9)


def test_several_replicas_on_a_node_are_one_ring_over_its_link() -> None:
    rings = rings_of(Mesh(replicate=8, shard=4), cluster=cluster_of("4x8xh100-80gb"))
    assert (rings.replicate.num_ranks, rings.replicate.num_nodes) == (8, 4)
    assert (rings.shard.num_ranks, rings.shard.num_nodes) == (4, 1)


def test_what_nobody_linked_cannot_be_timed() -> None:
    assert not can_link(cluster_of("4xcpu"))
    assert can_link(cluster_of("1xcpu"))
