"""A crash at every effect of a save, one by one: the last good checkpoint loads, and the next save works."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from shardwise.checkpoint import CheckpointError, Checkpoints
from shardwise.state.checkpoint.disk import Disk


class Crash(BaseException):
    """The process is no more."""


class DyingDisk(Disk):
    """Dies at the `at`-th effect, and does nothing after it. A write on which it dies is half done.

    `power`: the machine dies with it, and with the machine all that was not synced: the content of files, names in
    folders.
    """

    def __init__(self, *, at: int = 0, power: bool = False) -> None:
        self.done: list[tuple[str, str]] = []
        self._at = at
        self._power = power
        self._dead = False
        self._unsynced: dict[Any, int] = {}
        # Names that may be lost: [folder, name] of new files, (old, new) of folders.
        self._created: list[tuple[Path, str]] = []
        self._renamed: list[tuple[Path, Path]] = []

    def _effect(self, name: str, path: Path, half: Callable[[], Any] = lambda: None) -> None:
        if self._dead:
            raise Crash
        self.done.append((name, path.name))
        if len(self.done) == self._at:
            half()
            self.die()
            raise Crash

    def die(self) -> None:
        """From here on nothing has an effect, not even a clean-up."""
        self._dead = True
        for descriptor in self._unsynced.values():
            if self._power:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        if self._power:
            for folder, name in self._created:
                (folder / name).unlink(missing_ok=True)
            for old, new in reversed(self._renamed):
                new.rename(old)

    def make_folder(self, path: Path) -> None:
        self._effect("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self._effect("create", path)
        file = super().create(path)
        self._unsynced[file.name] = os.dup(file.fileno())
        self._created.append((path.parent, path.name))
        return file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self._effect("write", Path(file.name), lambda: file.write(data[: len(data) // 2]))
        super().write(file, data)

    def sync_file(self, file: BinaryIO) -> None:
        self._effect("sync_file", Path(file.name))
        os.close(self._unsynced.pop(file.name))
        super().sync_file(file)

    def sync_folder(self, path: Path) -> None:
        self._effect("sync_folder", path)
        self._created = [(folder, name) for folder, name in self._created if folder != path]
        self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._effect("rename", new)
        super().rename(old, new)
        self._created = [(new if folder == old else folder, name) for folder, name in self._created]
        self._renamed.append((old, new))

    def remove_file(self, path: Path) -> None:
        self._effect("remove_file", path)
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self._effect("remove_folder", path)
        super().remove_folder(path)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


Past = tuple[Path, dict[int, Any]]


def crashed_past(folder: Path) -> Past:
    """A folder with two good checkpoints and what two crashes left, and the weights at steps 1, 2 and 3."""
    model, optimizer = training()
    weights = {}
    checkpoints = Checkpoints(folder)
    for number in (1, 2, 3):
        step(model, optimizer)
        weights[number] = {name: value.clone() for name, value in model.state_dict().items()}
        if number < 3:
            checkpoints.save(model, optimizer, step=number)
            checkpoints.wait()
    shutil.copytree(folder / "step-00000001", folder / ".removing-step-00000000-00")
    (folder / ".saving-step-00000003-00").mkdir()
    (folder / ".saving-step-00000003-00" / "rank-00000.safetensors").write_bytes(b"half")
    return folder, weights


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    return crashed_past(tmp_path_factory.mktemp("past"))


def save_third(folder: Path, disk: Disk, *, keep: int = 2) -> None:
    model, optimizer = training()
    for _ in range(3):
        step(model, optimizer)
    Checkpoints(folder, disk=disk, keep=keep, asynchronous=False).save(model, optimizer, step=3)


def test_a_save_that_is_over_survives_a_loss_of_power(past: Past, tmp_path: Path) -> None:
    shutil.copytree(past[0], tmp_path / "all")
    disk = DyingDisk(power=True)
    save_third(tmp_path / "all", disk, keep=9)
    disk.die()
    assert check_last_good(tmp_path / "all", weights=past[1]) == 3


def effects_of_a_save(past: Past, folder: Path) -> list[tuple[str, str]]:
    shutil.copytree(past[0], folder)
    disk = DyingDisk()
    save_third(folder, disk)
    return disk.done


def test_a_save_syncs_all_it_wrote_before_it_takes_its_name_and_removes_the_oldest_after(
    past: Past, tmp_path: Path
) -> None:
    done = effects_of_a_save(past, tmp_path / "all")
    kinds = [name for name, _ in done]
    named = done.index(("rename", "step-00000003"))
    assert done[named - 1][0] == "sync_folder"
    assert done[named + 1] == ("sync_folder", "all")
    assert {"create", "write", "sync_file"} & set(kinds[named:]) == set()
    assert kinds[:named].count("sync_file") == kinds[:named].count("create") == 2
    assert done[named + 2][1].startswith(".removing-step-00000001-")
    assert done[named + 3] == ("sync_folder", "all")
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("power", [False, True])
def test_after_a_crash_at_any_effect_the_last_good_checkpoint_loads(past: Past, tmp_path: Path, power: bool) -> None:
    effects = effects_of_a_save(past, tmp_path / "all")
    found = [
        crash_at(past, tmp_path / str(at), at=at, power=power)  # one after the other, each in a copy of its own
        for at in range(1, len(effects) + 1)
    ]
    assert set(found) == {2, 3}
    assert len(found) > 30


def crash_at(past: Past, folder: Path, *, at: int, power: bool) -> int:
    """The step of the last good checkpoint after a crash at this effect; after it, the next save works."""
    shutil.copytree(past[0], folder)
    disk = DyingDisk(at=at, power=power)
    with pytest.raises(CheckpointError, match="step 3 was not written: rank 0: Crash"):
        save_third(folder, disk)
    finished = disk.done[:-1]
    committed = ("rename", "step-00000003") in finished
    if power and committed:
        committed = ("sync_folder", folder.name) in finished[finished.index(("rename", "step-00000003")) :]
    found = check_last_good(folder, weights=past[1])
    assert found == (3 if committed else 2), f"effect {at}: {disk.done[-1]}"
    save_third(folder, Disk())
    assert check_last_good(folder, weights=past[1]) == 3
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return found


def check_last_good(folder: Path, *, weights: dict[int, Any]) -> int:
    model, optimizer = training()
    checkpoints = Checkpoints(folder)
    saved = checkpoints.latest()
    assert saved is not None
    assert checkpoints.load(saved, model, optimizer).step == saved.step
    assert all(torch.equal(value, weights[saved.step][name]) for name, value in model.state_dict().items())
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(saved.step)}
    return saved.step
