"""Checkpoints of an ordinary model in one process: what comes back, what is refused, what is passed over."""

import json
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reliability.said import say
from shardwise.base.errors import DiskFailed
from shardwise.checkpoint import CheckpointError, Checkpoints, open_checkpoint
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.tensor_file import opened
from shardwise.state.checkpoint.verify import verify


class Small(nn.Module):
    """A tie, a parameter without dimensions, one without elements, a frozen one, buffers."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(3, width)
        self.again = self.first
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.again(x))) * self.scale + self.empty.sum()


def make(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Small()
    return model, optimizer(model.parameters(), **{"lr": 0.01, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_folder(folder: Path, *, steps: tuple[int, ...] = (1,), **options: Any) -> Any:
    model, optimizer = make()
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        train(model, optimizer)
        checkpoints.save(model, optimizer, step=step, progress={"step": step})
    checkpoints.close()
    return model, optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_two_more_steps_are_those_of_never_having_stopped(tmp_path: Path, kind: Any, options: Any) -> None:
    model, optimizer = make(kind, **options)
    train(model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=2, own={"random": torch.get_rng_state()})
    train(model, optimizer)
    other, others_optimizer = make(kind, **options)
    train(other, others_optimizer, steps=1)
    loaded = checkpoints.load(checkpoints.latest(), other, others_optimizer)
    assert torch.equal(loaded.own["random"], torch.get_rng_state())
    train(other, others_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_model_that_does_not_lie_end_to_end_comes_back(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, step=1)
    checkpoints.load(checkpoints.latest(), other)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_is_written_is_the_state_at_the_save_however_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    other, others_optimizer = make()
    checkpoints.load(checkpoints.latest(), other, others_optimizer)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_states_that_are_there_are_filled_where_they_are(tmp_path: Path) -> None:
    """What was recorded in a CUDA graph reads that memory and no other."""
    model, optimizer = make(lr=torch.tensor(0.01), foreach=False)
    train(model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=1)
    saved = checkpoints.latest()
    expected = {id(p): {key: value.clone() for key, value in state.items()} for p, state in optimizer.state.items()}
    memory = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    optimizer.param_groups[0]["lr"].fill_(1.0)
    train(model, optimizer)
    checkpoints.load(saved, model, optimizer)
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == memory
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.01)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(value, expected[id(parameter)][key]) for key, value in state.items())


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    saved_folder(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    json.loads((folder / "manifest.json").read_bytes())
    with opened(folder / "rank-00000.safetensors") as file:
        assert "optimizer.exp_avg.first.weight" in file.entries
        assert "model.again.weight" not in file.entries


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    saved_folder(tmp_path, steps=(1, 2, 3, 4), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_step_that_is_saved_again_does_not_replace_the_first_until_it_is_good(tmp_path: Path) -> None:
    saved_folder(tmp_path, steps=(5, 5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000005.1"]
    assert Checkpoints(tmp_path).latest().path.name == "step-00000005.1"


def flip(path: Path, *, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit of a tensor": lambda folder: flip(folder / "rank-00000.safetensors", at=0.9),
    "a bit of a header": lambda folder: flip(folder / "rank-00000.safetensors", at=0.01),
    "the start of the manifest": lambda folder: flip(folder / "manifest.json", at=0.0),
    "a digit of the manifest": lambda folder: flip(folder / "manifest.json", at=0.5),
    "the last byte": lambda folder: (folder / "rank-00000.safetensors").open("r+b").truncate(100),
    "no tensors": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a pickle": lambda folder: (folder / "manifest.json").write_bytes(b"\x80\x04K\x01."),
    "files of another": lambda folder: (folder / "rank-00000.safetensors").write_bytes(
        (folder.parent / "step-00000001" / "rank-00000.safetensors").read_bytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, damage: str) -> None:
    saved_folder(tmp_path, steps=(1, 2))
    DAMAGES[damage](tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=r"checkpoint passed over: .*step-00000002") as caught:
        saved = Checkpoints(tmp_path).latest()
    assert saved.step == 1
    assert len(caught) == 1
    assert len(str(caught[0].message).splitlines()) == 1
    with pytest.raises(CheckpointError, match="step-00000002"):
        open_checkpoint(tmp_path / "step-00000002")
    assert verify(tmp_path / "step-00000001").contents.step == 1


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Its manifest with another body, and the checksum of that."""
    outer = json.loads((folder / "manifest.json").read_bytes())
    change(outer["body"])
    outer["crc32"] = zlib.crc32(json.dumps(outer["body"]).encode())
    (folder / "manifest.json").write_text(json.dumps(outer))


@pytest.mark.ledger("boxes-do-not-cover", outcome="refused")
def test_a_tensor_that_its_boxes_do_not_cover_is_not_loaded(tmp_path: Path) -> None:
    saved_folder(tmp_path)
    rewritten(tmp_path / "step-00000001", lambda body: body["tensors"]["model.first.weight"]["boxes"].clear())
    with pytest.raises(CheckpointError, match="the boxes of model.first.weight do not cover it") as caught:
        open_checkpoint(tmp_path / "step-00000001")
    say(str(caught.value))


@pytest.mark.parametrize(
    "change",
    [
        {"step": "1; rm"},
        {"step": -1},
        {"num_ranks": None},
        {"plan": "x"},
        {"plan": {"strategy": "ddp", "mesh": 3}},
        {"parameters": {"a": 3}},
        {"parameters": {"a": [["q"], "float32"]}},
        {"aliases": {"a": 7}},
        {"optimizer": [1]},
    ],
    ids=str,
)
def test_a_manifest_of_other_types_is_refused_whatever_its_checksum_says(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    saved_folder(tmp_path)
    rewritten(tmp_path / "step-00000001", lambda body: body["contents"].update(change))
    with pytest.raises(CheckpointError, match="manifest.json: is damaged or not a manifest") as caught:
        open_checkpoint(tmp_path / "step-00000001")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "a\nb", "x" * 300, ""])
def test_a_file_that_a_checkpoint_cannot_have_is_not_opened(tmp_path: Path, name: str) -> None:
    def rename(body: dict[str, Any]) -> None:
        body["files"] = {name: next(iter(body["files"].values()))}
        body["tensors"] = {}

    saved_folder(tmp_path)
    rewritten(tmp_path / "step-00000001", rename)
    with pytest.raises(CheckpointError, match="is not a file that a checkpoint has") as caught:
        open_checkpoint(tmp_path / "step-00000001")
    assert len(str(caught.value).splitlines()) == 1


def test_a_manifest_that_is_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    saved_folder(tmp_path)
    with (tmp_path / "step-00000001" / "manifest.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="manifest.json: cannot be read .is larger than 1,073,741,824 bytes"):
        open_checkpoint(tmp_path / "step-00000001")


@pytest.mark.ledger("not-a-regular-file", outcome="refused")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    saved_folder(tmp_path)
    path = tmp_path / "step-00000001" / name
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}: (cannot be read|is missing)") as caught:
        open_checkpoint(tmp_path / "step-00000001")
    say(str(caught.value))


def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(tmp_path: Path) -> None:
    saved_folder(tmp_path, steps=(1, 2))
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    model, optimizer = make()
    Checkpoints(tmp_path, asynchronous=False).save(model, optimizer, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.ledger("checkpoint-damaged", outcome="right")
def test_a_damaged_checkpoint_of_the_right_size_does_not_push_out_the_good_one_that_was_loaded(tmp_path: Path) -> None:
    saved_folder(tmp_path, steps=(1, 2))
    flip(tmp_path / "step-00000002" / "rank-00000.safetensors", at=0.9)
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=False)
    with pytest.warns(UserWarning, match="passed over") as caught:
        saved = checkpoints.latest()
    say(str(caught[0].message))
    checkpoints.load(saved, model, optimizer)
    checkpoints.save(model, optimizer, step=3)
    assert verify(tmp_path / "step-00000001").contents.step == 1
    assert verify(tmp_path / "step-00000003").contents.step == 3


def test_there_is_none_in_an_empty_or_a_missing_folder(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).latest() is None
    assert Checkpoints(tmp_path / "none").latest() is None


class FullDisk(Disk):
    def write(self, file: Any, data: memoryview) -> None:
        raise OSError(28, "No space left on device")


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call_and_once(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, disk=FullDisk())
    checkpoints.save(model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="step 1 was not written: rank 0: OSError: .*No space left"):
        checkpoints.save(model, optimizer, step=2)
    checkpoints.wait()
    assert checkpoints.latest() is None
    assert list(tmp_path.iterdir()) == [], "what was written of it fills no disk"


@pytest.mark.parametrize(("code", "kind"), [(5, DiskFailed), (28, DiskFailed), (13, CheckpointError)])
def test_an_error_of_the_disk_is_told_from_one_that_a_user_must_mend(tmp_path: Path, code: int, kind: type) -> None:
    class Failing(Disk):
        def sync_file(self, file: Any) -> None:
            raise OSError(code, "on purpose")

    model, optimizer = make()
    with pytest.raises(CheckpointError, match="step 1 was not written: rank 0: .*on purpose") as caught:
        Checkpoints(tmp_path, disk=Failing(), asynchronous=False).save(model, optimizer, step=1)
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


def refused(tmp_path: Path, model: nn.Module, optimizer: Any) -> str:
    """The line with which a checkpoint of `make()` is refused; nothing is changed."""
    saved_folder(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(checkpoints.latest(), model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_model_of_other_shapes_is_refused_by_the_first_that_differs(tmp_path: Path) -> None:
    line = refused(tmp_path, Small(width=6), None)
    assert line.endswith("first.weight has shape (5, 3) in the checkpoint, (6, 3) in the model")


def test_a_model_of_other_names_is_refused_by_the_first_that_differs(tmp_path: Path) -> None:
    assert "it has no weight, of shape (2, 2)" in refused(tmp_path, nn.Linear(2, 2), None)
    less = Small()
    del less.scale
    assert "it has scale, of shape (), and the model has not" in refused(tmp_path, less, None)


def test_an_optimizer_of_another_kind_or_other_groups_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(torch.optim.SGD)
    assert "holds the state of AdamW, and this optimizer is SGD" in refused(tmp_path, model, optimizer)
    fewer = torch.optim.AdamW([model.scale])
    assert "param group 0 holds empty only in the checkpoint" in refused(tmp_path, model, fewer)
    more = torch.optim.AdamW([{"params": [model.scale]}, {"params": [model.empty]}])
    assert "has 1 param groups, this one 2" in refused(tmp_path, model, more)


def test_states_of_other_shapes_are_saved_where_the_parameter_is_whole(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    optimizer.state[model.first.weight]["rows"] = torch.arange(5.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=1)
    checkpoints.wait()
    optimizer.state[model.first.weight]["rows"].zero_()
    latest = checkpoints.latest()
    assert latest is not None
    checkpoints.load(latest, model, optimizer)
    assert torch.equal(optimizer.state[model.first.weight]["rows"], torch.arange(5.0))


def test_progress_that_only_pickle_could_write_is_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=r"progress\.set is a set"):
        Checkpoints(tmp_path).save(model, optimizer, step=1, progress={"set": {1}})


def test_weights_alone_start_the_optimizer_afresh_and_say_so(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, step=1)
    saved = checkpoints.latest()
    with pytest.warns(UserWarning, match="weights only: the optimizer starts afresh"):
        checkpoints.load(saved, model, optimizer)
    assert not optimizer.state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.load(saved, model)
