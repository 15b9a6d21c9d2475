"""The groups of a mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.comm.groups.groups import MeshGroups, mesh_groups
from shardwise.comm.job.absent import absent_group
from shardwise.plan.placement import Mesh


@contextmanager
def job_of_one(backend: str, *, timeout: timedelta | None) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def timeouts(groups: MeshGroups) -> list[timedelta]:
    """Of every backend of every group."""
    handles = [group.handle for group in (groups.gather, groups.reduce, groups.replicate, groups.reduce_world)]
    return [handle._get_backend(kind).options._timeout for handle in handles for kind in handle._device_types]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.ledger("user-timeout", outcome="right")
@pytest.mark.parametrize(
    "backend",
    ["gloo", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("nccl", "cpu:gloo,cuda:nccl"))],
)
def test_they_have_the_time_out_that_the_user_gave_the_job(backend: str) -> None:
    for seconds in (77, 78):
        with job_of_one(backend, timeout=timedelta(seconds=seconds)):
            assert set(timeouts(mesh_groups(Mesh()))) == {timedelta(seconds=seconds)}


def test_without_one_they_have_torchs_own() -> None:
    with job_of_one("gloo", timeout=None):
        assert set(timeouts(mesh_groups(Mesh()))) == {dist.default_pg_timeout}


def test_a_backend_that_tells_no_time_out_is_left_alone() -> None:
    with absent_group(4):
        assert mesh_groups(Mesh(replicate=2, shard=2)).gather.size == 2
