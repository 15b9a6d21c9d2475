"""`shardwise train` with its checkpoints in an S3 server and its run folder on the disk."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import preload, run_ranks
from train_tasks import config, lines, trained
from typer.testing import CliRunner

from object_server import SECRET, ObjectServer, client_of, needs_server
from shardwise.base.errors import ShardwiseError
from shardwise.doors.cli.app import app
from shardwise.doors.cli.own_files import describe_own
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_section import InvalidConfig
from shardwise.training.rank_run import train

pytestmark = [pytest.mark.timeout(240), needs_server]

preload("s3fs")

Environment = Mapping[str, str]


def trained_in(rank: int, environment: Environment, asked: TrainConfig, crash_after: int | None = None) -> Any:
    with client_of(environment):
        return trained(rank, asked, crash_after)


def refused(rank: int, environment: Environment, asked: TrainConfig, fresh: bool) -> str:
    with client_of(environment):
        try:
            train(asked, fresh=fresh)
        except ShardwiseError as error:
            return str(error)
        return ""


def test_train_resumes_from_a_store_on_a_fresh_machine_and_writes_no_credentials(
    s3: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    environment = dict(object_server.environment)
    first, fresh, kept = (tmp_path / name for name in ("first", "fresh", "kept"))
    options: Any = {"train": {"steps": 4}, "checkpoint": {"folder": s3, "every": 2}}
    run_ranks(trained_in, num_ranks=2, args=(environment, config(first, **options), 3))
    assert not (first / "checkpoints").exists()
    shutil.move(first, kept)
    run_ranks(trained_in, num_ranks=2, args=(environment, config(fresh, **options)))
    assert [line["step"] for line in lines(fresh)] == [3, 4]
    (third,) = (line["loss"] for line in lines(kept) if line["step"] == 3)
    assert lines(fresh)[0]["loss"] == third
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path

    said = CliRunner().invoke(app, ["checkpoint", "inspect", str(fresh)]).output
    assert said.startswith(f"{s3}/step-00000004\n  step        4\n")
    assert str(describe_own(fresh)).endswith(f"; checkpoints in {s3}")

    (said, _) = run_ranks(refused, num_ranks=2, args=(environment, config(fresh, **options), True))
    assert said == (
        f"--fresh: {s3} holds 2 checkpoints, which may be of another run: remove them, or choose another "
        "checkpoint.folder"
    )
    other: Any = options | {"checkpoint": {"folder": f"{s3}-gone"}}
    (said, _) = run_ranks(refused, num_ranks=2, args=(environment, config(fresh, **other), False))
    assert said.startswith(f"{fresh} holds a run that cannot be resumed: it saved step 4, but {s3}-gone holds no")


def test_credentials_in_a_config_are_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config(tmp_path, train={"steps": 1}, checkpoint={"folder": f"s3://key:{SECRET}@bucket/run"})
    assert str(caught.value) == (
        "checkpoint.folder: s3://…: a URL must not hold credentials or options: they come from AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or a profile"
    )


def test_checkpoints_can_be_in_another_folder_of_the_disk(tmp_path: Path) -> None:
    there = tmp_path / "there"
    asked = config(tmp_path / "run", train={"steps": 2}, checkpoint={"folder": str(there)})
    run_ranks(trained, num_ranks=2, args=(asked,))
    assert [path.name for path in there.iterdir()] == ["step-00000002"]
    assert not (tmp_path / "run" / "checkpoints").exists()
