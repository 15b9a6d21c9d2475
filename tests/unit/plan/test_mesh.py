import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import InvalidPlan
from shardwise.plan.placement import Mesh

meshes = st.builds(Mesh, replicate=st.integers(1, 8), shard=st.integers(1, 8))


@given(meshes)
def test_groups_cut_the_ranks_into_a_grid(mesh: Mesh) -> None:
    for rank in range(mesh.num_ranks):
        shard, replicate = mesh.shard_group(rank), mesh.replicate_group(rank)
        assert (len(shard), len(replicate)) == (mesh.shard, mesh.replicate)
        assert set(shard) & set(replicate) == {rank}
        assert all(mesh.shard_group(other) == shard for other in shard)
        assert all(mesh.replicate_group(other) == replicate for other in replicate)
        assert (replicate.index(rank), shard.index(rank)) == mesh.coordinates(rank)


def test_ranks_of_a_shard_group_are_neighbours() -> None:
    assert Mesh(replicate=2, shard=4).shard_group(6) == (4, 5, 6, 7)
    assert Mesh(replicate=2, shard=4).replicate_group(6) == (2, 6)


@pytest.mark.parametrize("length", [0, -1, 1.0, True, "2", None])
def test_an_axis_is_a_whole_number_of_at_least_one(length: object) -> None:
    with pytest.raises(InvalidPlan, match="mesh.shard = "):
        Mesh(shard=length)  # type: ignore[arg-type]


def test_a_job_of_another_size_is_refused_with_the_way_out() -> None:
    Mesh(replicate=2, shard=2).check_ranks(4)
    with pytest.raises(InvalidPlan, match="2×2 is 4 ranks, but the job has 6: .*--set plan.mesh=.* = 6"):
        Mesh(replicate=2, shard=2).check_ranks(6)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="rank 4 is outside"):
        Mesh(replicate=2, shard=2).coordinates(4)
