"""Checkpoints of several ranks in an S3 server: resharding, and a rank that fails or is killed."""

from collections.abc import Mapping
from typing import Any

import pytest
from broken_disks import FailingDisk
from ranks import RankFailed, preload, run_ranks
from test_checkpoint import equal, prepared, train

import shardwise
from object_server import Fault, ObjectServer, client_of, needs_server, objects, unfinished
from shardwise.checkpoint import CheckpointError, Checkpoints
from shardwise.plan import Plan

pytestmark = [pytest.mark.timeout(240), needs_server]

preload("s3fs")

FSDP = Plan(strategy="fsdp")
Environment = Mapping[str, str]


def saved_by(rank: int, environment: Environment, url: str, *, steps: int = 1) -> Any:
    with client_of(environment):
        model, optimizer, batch = prepared(FSDP)
        checkpoints = Checkpoints(url)
        for number in range(1, steps + 1):
            train(model, optimizer, batch, rank=rank, steps=range(number - 1, number))
            checkpoints.save(model, optimizer, step=number, own={"rank": rank})
        checkpoints.close()
        return shardwise.full_state_dict(model, optimizer)


def loaded_by(rank: int, environment: Environment, url: str, plan: Plan) -> Any:
    with client_of(environment):
        model, optimizer, _ = prepared(plan)
        checkpoints = Checkpoints(url)
        loaded = checkpoints.load(checkpoints.latest(), model, optimizer)
        checkpoints.close()
        return loaded.step, shardwise.full_state_dict(model, optimizer)


def test_two_ranks_save_and_three_load_another_plan(s3: str, object_server: ObjectServer) -> None:
    environment = dict(object_server.environment)
    # One listing, one part and one read fail, and are made again.
    object_server.faults.planned = [
        Fault(kind="error", pattern="list-type"),
        Fault(kind="cut", pattern="PUT .*rank-00001"),
        Fault(kind="error", pattern="GET .*rank-00000"),
    ]
    full, _ = run_ranks(saved_by, num_ranks=2, args=(environment, s3))
    names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert objects(s3) == [f"step-00000001/{name}" for name in names]
    results = run_ranks(loaded_by, num_ranks=3, args=(environment, s3, Plan(strategy="zero2")))
    assert all(step == 1 for step, _ in results)
    assert equal(results[0][1], full)
    assert not any(fault.times for fault in object_server.faults.planned)


def fails_at(rank: int, environment: Environment, url: str, failing: int) -> str:
    with client_of(environment):
        model, optimizer, batch = prepared(FSDP)
        checkpoints = Checkpoints(url)
        train(model, optimizer, batch, rank=rank, steps=range(1))
        checkpoints.save(model, optimizer, step=1)
        checkpoints.wait()
        # In the middle of its file; the other rank's is whole by then, or about to be.
        checkpoints._disk = FailingDisk(at=4 if rank == failing else 0)
        checkpoints.save(model, optimizer, step=2)
        try:
            checkpoints.close()
        except CheckpointError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_its_file_leaves_nothing_of_the_checkpoint(
    s3: str, object_server: ObjectServer, failing: int
) -> None:
    said = run_ranks(fails_at, num_ranks=2, args=(dict(object_server.environment), s3, failing))
    assert set(said) == {
        f"the checkpoint of step 2 was not written: rank {failing}: OSError: [Errno 5] Input/output error"
    }
    assert {name.partition("/")[0] for name in objects(s3)} == {"step-00000001"}
    assert unfinished(s3.split("/")[2]) == []


def killed_in_its_upload(rank: int, environment: Environment, url: str) -> None:
    from shardwise.base.files import upload

    with client_of(environment):
        # A worker is used once more only if it is as before; this one is killed.
        upload.FIRST_PART_BYTES = 4000
        model, optimizer, batch = prepared(FSDP)
        checkpoints = Checkpoints(url, asynchronous=False)
        train(model, optimizer, batch, rank=rank, steps=range(1))
        checkpoints.save(model, optimizer, step=1)
        checkpoints._disk = FailingDisk(at=25 if rank == 1 else 0, kill=True)
        checkpoints.save(model, optimizer, step=2)


def test_what_a_killed_rank_had_uploaded_is_no_checkpoint_and_the_next_save_removes_it(
    s3: str, object_server: ObjectServer
) -> None:
    environment = dict(object_server.environment)
    bucket = s3.split("/")[2]
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(killed_in_its_upload, num_ranks=2, args=(environment, s3))
    assert "run/step-00000002/rank-00001.safetensors" in unfinished(bucket)
    assert not [name for name in objects(s3) if name.startswith("step-00000002/manifest")]
    results = run_ranks(loaded_by, num_ranks=2, args=(environment, s3, Plan(strategy="ddp")))
    assert [step for step, _ in results] == [1, 1]
    run_ranks(saved_by, num_ranks=2, args=(environment, s3), timeout_seconds=60)
    assert unfinished(bucket) == []
    # Saved again as step 1, under a name that no rank of the killed job may still write to.
    assert {name.partition("/")[0] for name in objects(s3)} == {"step-00000001", "step-00000001.1"}
