"""Checkpoints in object stores: a real S3 server, fsspec's memory, and a folder by fsspec."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from state.checkpoint.test_crash import Crash
from torch import nn
from typer.testing import CliRunner

from object_server import SECRET, needs_server, objects, unfinished
from shardwise.base.errors import InvalidData, MissingExtra
from shardwise.base.files.object_path import Location, ObjectPath, location
from shardwise.checkpoint import CheckpointError, Checkpoints, open_checkpoint
from shardwise.doors.cli.app import app
from shardwise.state.checkpoint.disk import Disk, NewFile
from shardwise.state.checkpoint.export import export_weights, import_weights
from shardwise.state.checkpoint.folder import checkpoints_in
from shardwise.state.checkpoint.verify import verify

pytestmark = pytest.mark.timeout(60)

EVERY_STORE = pytest.mark.parametrize(
    "store", [pytest.param("s3", marks=needs_server), "memory", "local"], indirect=True
)


def model_at(number: int) -> nn.Module:
    """A small model whose values tell its step."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


def save(store: str, *, steps: int, keep: int = 2, disk: Disk | None = None) -> None:
    checkpoints = Checkpoints(store, keep=keep, disk=disk)
    for number in range(1, steps + 1):
        checkpoints.save(model_at(number), step=number)
    checkpoints.close()


def loaded_step(store: str, *, lines: list[str] | None = None) -> int:
    """The step of the newest good checkpoint, whose values are those of that step."""
    model = model_at(0)
    checkpoints = Checkpoints(store, tell=([] if lines is None else lines).append)
    saved = checkpoints.latest()
    assert saved is not None
    assert checkpoints.load(saved, model).step == saved.step
    assert all(bool((parameter == saved.step).all()) for parameter in model.parameters())
    return saved.step


@EVERY_STORE
def test_the_newest_are_kept_in_a_store_and_the_last_one_loads(store: str) -> None:
    assert Checkpoints(store).latest() is None
    save(store, steps=4)
    assert objects(store) == [
        f"step-0000000{number}/{name}" for number in (3, 4) for name in ("manifest.json", "rank-00000.safetensors")
    ]
    assert loaded_step(store) == 4
    assert verify(location(store) / "step-00000003").contents.step == 3
    assert open_checkpoint(f"{store}/step-00000004").step == 4


@EVERY_STORE
def test_a_step_that_is_saved_again_gets_a_name_of_its_own(store: str) -> None:
    save(store, steps=1)
    save(store, steps=1)
    assert [path.name for path in checkpoints_in(location(store))] == ["step-00000001", "step-00000001.1"]


@EVERY_STORE
def test_a_damaged_object_is_named_and_the_checkpoint_before_it_is_used(store: str) -> None:
    save(store, steps=2)
    path = location(store) / "step-00000002" / "rank-00000.safetensors"
    assert isinstance(path, ObjectPath)
    content = bytearray(path.read_range(0, path.stat().st_size))
    content[-1] ^= 1
    path.store.pipe_file(path.key, bytes(content))
    lines: list[str] = []
    assert loaded_step(store, lines=lines) == 1
    assert lines == [f"checkpoint passed over: {path}: is damaged: its {len(content)} bytes do not have their checksum"]


@EVERY_STORE
def test_weights_are_exported_from_a_store_and_imported_into_it(store: str, tmp_path: Path) -> None:
    save(store, steps=1)
    (file,) = export_weights(location(store) / "step-00000001", tmp_path / "model.safetensors")
    made = import_weights([file], location(f"{store}/imported"))
    assert str(made).endswith("imported/step-00000000")
    assert set(verify(made).contents.parameters) == {"weight", "bias"}


@needs_server
def test_the_command_inspects_and_verifies_a_store(s3: str) -> None:
    save(s3, steps=2)
    said = CliRunner().invoke(app, ["checkpoint", "inspect", s3]).output
    assert f"{s3}/step-00000002\n  step        2\n" in said
    said = CliRunner().invoke(app, ["checkpoint", "verify", s3]).output
    assert [line.split()[:2] for line in said.splitlines()] == [["step-00000001", "good"], ["step-00000002", "good"]]


class DyingStore(Disk):
    """Ends at the `at`-th effect, which it does by half; nothing has an effect after it."""

    def __init__(self, *, at: int = 0) -> None:
        self.done: list[tuple[str, str]] = []
        self._at = at

    def _effect(self, name: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        if self._at and len(self.done) >= self._at:
            raise Crash
        self.done.append((name, path.rpartition("/")[2]))
        if len(self.done) == self._at:
            half()
            raise Crash

    def make_folder(self, path: Location) -> None:
        self._effect("make_folder", str(path))
        super().make_folder(path)

    def create(self, path: Location) -> NewFile:
        self._effect("create", str(path))
        return super().create(path)

    def write(self, file: NewFile, data: memoryview) -> None:
        half = data[: len(data) // 2]
        self._effect("write", file.name, lambda: super(DyingStore, self).write(file, half))
        super().write(file, data)

    def sync_file(self, file: NewFile) -> None:
        self._effect("sync_file", file.name)
        super().sync_file(file)

    def discard_file(self, file: NewFile) -> None:
        self._effect("discard_file", file.name)
        super().discard_file(file)

    def remove_file(self, path: Location) -> None:
        self._effect("remove_file", str(path))
        super().remove_file(path)

    def remove_folder(self, path: Location) -> None:
        self._effect("remove_folder", str(path))
        super().remove_folder(path)

    def abort_uploads(self, path: Location) -> None:
        self._effect("abort_uploads", str(path))
        super().abort_uploads(path)


def save_third(store: str, *, disk: Disk) -> None:
    Checkpoints(store, disk=disk, asynchronous=False, keep=1).save(model_at(3), step=3)


def content_of(store: str) -> dict[str, bytes]:
    path = location(store)
    return {name: path.store.cat_file(f"{path.key}/{name}") for name in objects(store)}


def set_content(store: str, content: dict[str, bytes]) -> None:
    path = location(store)
    for name in set(objects(store)) - set(content):
        path.store.rm_file(f"{path.key}/{name}")
    for name, value in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        path.store.pipe_file(f"{path.key}/{name}", value)


@pytest.mark.timeout(240)
@EVERY_STORE
def test_after_a_crash_at_any_effect_in_a_store_the_last_good_checkpoint_loads(
    store: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    save(store, steps=2, keep=1)
    content = content_of(store)
    if store.startswith("s3"):
        # Each file is an upload of parts. Elsewhere only a store's own driver makes objects appear whole.
        monkeypatch.setattr("shardwise.base.files.upload.FIRST_PART_BYTES", 200)
    # The server takes a second for each: the usual run has time for every third.
    every = 3 if store.startswith("s3") and not request.config.getoption("--whole") else 1
    at, found, ends = 1 - every, [], False
    while not ends:
        at += every
        set_content(store, content)
        disk = DyingStore(at=at)
        try:
            save_third(store, disk=disk)
            ends = True
        except CheckpointError as error:
            assert "step 3 was not written: rank 0: Crash" in str(error)
        found.append(loaded_step(store))
        committed = ("sync_file", "manifest.json") in (disk.done if ends else disk.done[:-1])
        assert found[-1] == (3 if committed else 2), f"effect {at}: {disk.done[-1]}"
        save_third(store, disk=Disk())
        left = objects(store)
        assert [name.rpartition("/")[2] for name in left] == ["manifest.json", "rank-00000.safetensors"]
        assert all(name.startswith("step-00000003") for name in left)
        if store.startswith("s3"):
            assert unfinished(store.split("/")[2]) == []
    assert set(found) == {2, 3}
    assert len(found) > 12 / every


@needs_server
def test_a_checkpoint_that_another_process_saves_is_seen_at_once(s3: str) -> None:
    """fsspec's listings are cached by default."""
    reader = Checkpoints(s3)
    assert reader.latest() is None
    for number in (1, 2):
        save(s3, steps=number)
        saved = reader.latest()
        assert saved is not None
        assert saved.step == number
    assert loaded_step(s3) == 2


def test_a_url_that_was_made_a_path_is_refused() -> None:
    with pytest.raises(InvalidData, match="s3:/bucket/run: Path drops a slash of a URL: give it as a string, s3://…"):
        Checkpoints(Path("s3://bucket/run"))


def test_a_file_url_is_a_folder_on_the_disk(tmp_path: Path) -> None:
    assert location(f"file://{tmp_path}") == tmp_path
    save(f"file://{tmp_path}", steps=1)
    assert loaded_step(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/run", "s3fs", "s3"),
        ("gs://bucket/run", "gcsfs", "gcs"),
        ("az://container/run", "adlfs", "az"),
        ("hf://datasets/me/run", "huggingface_hub", "hf"),
    ],
)
def test_a_driver_that_is_missing_is_named_with_its_extra(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    with pytest.raises(MissingExtra) as caught:
        Checkpoints(url)
    assert str(caught.value) == f"{url} needs {package}: pip install 'shardwise[{extra}]'"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("ftp://host/run", "ftp:// is not a store for checkpoints; known: s3, gs, az, hf, file"),
        ("s3://", "s3://: must be s3://BUCKET/FOLDER"),
        ("s3://bucket/a::zip://b", "s3://bucket/a::zip://b: must be s3://BUCKET/FOLDER"),
        (
            f"s3://key:{SECRET}@bucket/run",
            "s3://…: a URL must not hold credentials or options: they come from AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or a profile",
        ),
        (
            f"az://container/run?sig={SECRET}",
            "az://…: a URL must not hold credentials or options: they come from AZURE_STORAGE_CONNECTION_STRING, or "
            "AZURE_STORAGE_ACCOUNT_NAME and _KEY",
        ),
    ],
)
def test_a_url_that_is_wrong_is_one_line_without_credentials(url: str, line: str) -> None:
    with pytest.raises(InvalidData) as caught:
        Checkpoints(url)
    assert str(caught.value) == line
