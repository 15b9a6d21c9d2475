"""Run folders: files in them that the run did not write are one line, and none of them is replaced or removed."""

import json
import os
from pathlib import Path

import pytest

from shardwise.training import run_folder
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_section import InvalidConfig

pytestmark = pytest.mark.timeout(30)

ENVIRONMENT = {"num_ranks": 2, "command": ["shardwise", "train"]}


def config_in(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "task": {"model": "gpt-2l-64", "dataset": "stdlib"},
            "train": {"steps": 2},
            "plan": {"strategy": "ddp", "micro_batch": 2},
            "run": {"folder": str(folder)},
        }
    )


def claimed(folder: Path) -> TrainConfig:
    """A run folder with a checkpoint's folder in it."""
    config = config_in(folder)
    run_folder.claim(config, fresh=False, environment=ENVIRONMENT)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    run_folder.save_step(folder, 1)
    return config


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_a_config_of_a_run_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    config = claimed(tmp_path)
    (tmp_path / "config.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(InvalidConfig, match="config.toml: is not TOML: nested too deeply.*: --fresh starts the run"):
        run_folder.claim(config, fresh=False, environment=ENVIRONMENT)
    pipe(tmp_path / "config.toml")
    with pytest.raises(InvalidConfig, match=r"config.toml: cannot be read \(is not a regular file\): --fresh starts"):
        run_folder.claim(config, fresh=False, environment=ENVIRONMENT)


@pytest.mark.parametrize("content", [None, '{"step": Infinity}', '{"step": 1e99}', "[" * 100_000, "[]", "{}"])
def test_a_saved_step_that_cannot_be_read_still_says_that_a_step_was_saved(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "saved.json"
    if content is None:
        pipe(path)
    else:
        path.write_text(content)
    with pytest.raises(InvalidConfig, match="holds a run that cannot be resumed: it saved step 0, but"):
        run_folder.refuse_if_saved(config_in(tmp_path))


@pytest.mark.parametrize(
    "content", [None, '{"num_ranks": Infinity}', '{"num_ranks": 1e400}', '{"num_ranks": true}', "[" * 100_000, "[1]"]
)
def test_a_number_of_ranks_that_cannot_be_read_is_not_known(tmp_path: Path, content: str | None) -> None:
    claimed(tmp_path)
    assert run_folder.samples_of_step(tmp_path) == 4
    path = tmp_path / "environment.json"
    if content is None:
        pipe(path)
    else:
        path.write_text(content)
    assert run_folder.samples_of_step(tmp_path) is None


FOREIGN = {
    "config.toml": "[mine]\n",
    "metrics.jsonl": '{"loss": 1.0}\n',
    "plan.toml": "mine",
    "environment.json": '{"name": "conda"}',
    "checkpoints/model.pt": "weights",
    "tensorboard/events": "mine",
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_is_replaced_or_removed_in_a_folder_that_no_run_has_made(
    tmp_path: Path, name: str, fresh: bool
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(FOREIGN[name])
    there = name.partition("/")[0]
    with pytest.raises(InvalidConfig, match=f"holds {there}, and is not the folder of a run.*: nothing in it is repl"):
        run_folder.claim(config_in(tmp_path), fresh=fresh, environment=ENVIRONMENT)
    assert path.read_text() == FOREIGN[name]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [there]


def test_a_folder_with_other_files_and_imported_checkpoints_becomes_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step-00000000").mkdir(parents=True)
    with pytest.raises(InvalidConfig, match="holds checkpoints"):
        run_folder.claim(config_in(tmp_path), fresh=True, environment=ENVIRONMENT)
    run_folder.claim(config_in(tmp_path), fresh=False, environment=ENVIRONMENT)
    run_folder.claim(config_in(tmp_path), fresh=True, environment=ENVIRONMENT)
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_of_a_run_before_there_was_a_marker_is_resumed_and_cleared(tmp_path: Path) -> None:
    config = claimed(tmp_path)
    environment = {"shardwise": "1.0", "num_ranks": 2}
    for fresh in (False, True):
        (tmp_path / ".shardwise").unlink()
        (tmp_path / "environment.json").write_text(json.dumps(environment))
        run_folder.claim(config, fresh=fresh, environment=environment)
    assert not (tmp_path / "checkpoints").exists()
