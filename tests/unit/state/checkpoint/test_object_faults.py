"""Failures between a save and an S3 server: what may pass is tried again, and what does not leaves nothing behind."""

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state.checkpoint.test_object_store import loaded_step, model_at, save
from torch import nn

from object_server import SECRET, Fault, ObjectServer, forget_clients, needs_server, objects, unfinished
from shardwise.base.errors import DiskFailed, InvalidData
from shardwise.base.files import attempts, upload
from shardwise.base.files.attempts import MOST_ATTEMPTS, attempted, redacted
from shardwise.base.files.object_path import ObjectPath, location
from shardwise.checkpoint import CheckpointError, Checkpoints

pytestmark = [pytest.mark.timeout(60), needs_server]

PART_BYTES = 50_000
NUM_PARTS = 14


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(attempts, "_FIRST_PAUSE_SECONDS", 0.001)


class Large(nn.Module):
    """A model whose file has so many parts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(NUM_PARTS * PART_BYTES // 4 - 100, generator=generator))


def save_large(url: str) -> nn.Module:
    model = Large()
    Checkpoints(url, asynchronous=False).save(model, step=1)
    return model


def check_large(url: str, model: nn.Module) -> None:
    checkpoints, other = Checkpoints(url), Large()
    nn.init.zeros_(other.weight)
    saved = checkpoints.latest()
    assert saved is not None
    checkpoints.load(saved, other)
    assert torch.equal(other.weight, next(model.parameters()))
    assert objects(url) == ["step-00000001/manifest.json", "step-00000001/rank-00000.safetensors"]
    assert unfinished(url.split("/")[2]) == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="error", pattern=r"PUT .*partNumber=", times=3),
        Fault(kind="error", pattern=r"POST .*uploads", times=2),
        Fault(kind="error", pattern=r"POST .*uploadId=", times=2),
        Fault(kind="error", pattern=r"PUT .*manifest.json", times=2),
        Fault(kind="cut", pattern=r"PUT .*partNumber=[2-5]\b", times=3),
        Fault(kind="cut", pattern=r"PUT .*manifest.json", times=2),
        Fault(kind="lost", pattern=r"PUT .*partNumber=3\b"),
        Fault(kind="lost", pattern=r"PUT .*manifest.json"),
        Fault(kind="lost", pattern=r"POST .*uploadId="),
        Fault(kind="error", pattern=r"HEAD .*manifest.json", times=2),
        Fault(kind="error", pattern=r"GET .*list-type", times=2),
    ],
    ids=lambda fault: f"{fault.kind} {fault.pattern}",
)
def test_a_request_that_fails_is_made_again(s3: str, object_server: ObjectServer, fault: Fault) -> None:
    object_server.faults.planned = [fault]
    model = save_large(s3)
    assert fault.times == 0
    check_large(s3, model)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("error", "GET .*rank-00000"),
        ("cut", "GET .*rank-00000"),
        ("cut", "GET .*manifest"),
        ("error", "HEAD .*rank-00000"),
    ],
)
def test_a_read_that_fails_is_made_again(s3: str, object_server: ObjectServer, kind: str, pattern: str) -> None:
    model = save_large(s3)
    object_server.faults.planned = [fault := Fault(kind=kind, pattern=pattern, times=2)]
    check_large(s3, model)
    assert fault.times == 0


def test_a_slow_part_does_not_hold_up_the_others_and_several_go_side_by_side(
    s3: str, object_server: ObjectServer
) -> None:
    object_server.faults.planned = [
        Fault(kind="slow", pattern=r"partNumber=1\b", seconds=1.0),
        Fault(kind="slow", pattern=r"partNumber=[2-4]\b", times=3, seconds=0.2),
    ]
    begun = time.monotonic()
    model = save_large(s3)
    # One after another, parts 1 to 4 alone take 1.6 s.
    assert time.monotonic() - begun >= 1
    faults = object_server.faults
    parts = [request for request in faults.seen if "partNumber=" in request]
    assert 2 <= faults.most_parts <= upload.PARALLEL_PARTS
    assert len(parts) == NUM_PARTS
    check_large(s3, model)


def test_an_upload_holds_at_most_nine_parts_in_memory(
    s3: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = most = 0
    send = upload.PartedUpload._upload

    def counted(self: Any, number: int, body: bytearray) -> Any:
        nonlocal held
        try:
            return send(self, number, body)
        finally:
            held -= len(body)

    def sent(self: Any, body: bytearray, *, original: Callable[..., None] = upload.PartedUpload._send) -> None:
        nonlocal held, most
        held += len(body)
        most = max(most, held)
        original(self, body)

    monkeypatch.setattr(upload.PartedUpload, "_upload", counted)
    monkeypatch.setattr(upload.PartedUpload, "_send", sent)
    object_server.faults.planned = [Fault(kind="slow", pattern="partNumber=", times=NUM_PARTS, seconds=0.05)]
    check_large(s3, save_large(s3))
    assert 2 * PART_BYTES <= most <= (upload.PARALLEL_PARTS + 1) * PART_BYTES


def test_parts_of_very_large_files_get_larger_so_that_ten_thousand_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PART_BYTES", 8 * 2**20)
    assert {upload.part_bytes(number) for number in range(2000)} == {8 * 2**20}
    assert upload.part_bytes(9_999) == 128 * 2**20
    assert sum(map(upload.part_bytes, range(10_000))) > 480 * 2**30


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("error", r"PUT .*partNumber=7\b"),
        ("cut", r"PUT .*partNumber=7\b"),
        ("error", r"POST .*uploadId="),
        ("error", r"PUT .*manifest.json"),
    ],
)
def test_a_save_whose_requests_keep_failing_ends_after_bounded_attempts_and_leaves_nothing(
    s3: str, object_server: ObjectServer, kind: str, pattern: str
) -> None:
    save(s3, steps=1)
    object_server.faults.seen.clear()
    object_server.faults.planned = [Fault(kind=kind, pattern=pattern, times=10**9)]
    with pytest.raises(DiskFailed, match="step 2 was not written: rank 0: OSError: .*8 attempts, the last: ") as caught:
        Checkpoints(s3, asynchronous=False).save(Large(), step=2)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    gc.collect()
    tried = [request for request in object_server.faults.seen if re.search(pattern, request)]
    # aiohttp sends a request again if a connection that was open before ends.
    assert MOST_ATTEMPTS <= len(tried) <= (2 if kind == "cut" else 1) * MOST_ATTEMPTS
    assert objects(s3) == ["step-00000001/manifest.json", "step-00000001/rank-00000.safetensors"]
    assert unfinished(s3.split("/")[2]) == []
    object_server.faults.clear()
    assert loaded_step(s3) == 1


def test_an_asynchronous_save_that_fails_is_raised_by_the_next_call(s3: str, object_server: ObjectServer) -> None:
    object_server.faults.planned = [Fault(kind="error", pattern="PUT ", times=10**9)]
    checkpoints = Checkpoints(s3)
    checkpoints.save(model_at(1), step=1)
    with pytest.raises(DiskFailed, match="step 1 was not written"):
        checkpoints.wait()
    object_server.faults.clear()
    checkpoints.save(model_at(2), step=2)
    checkpoints.close()
    assert loaded_step(s3) == 2


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("GET .*list-type", "cannot be listed .8 attempts"),
        ("GET .*rank-00000", "the newest checkpoint cannot be read: .*step-00000002/rank-00000.safetensors"),
        ("GET .*step-00000002/manifest.json", "the newest checkpoint cannot be read: .*step-00000002/manifest.json"),
    ],
)
def test_a_store_that_does_not_answer_is_an_error_and_not_an_older_checkpoint(
    s3: str, object_server: ObjectServer, pattern: str, line: str
) -> None:
    save(s3, steps=2)
    object_server.faults.planned = [Fault(kind="error", pattern=pattern, times=10**9)]
    with pytest.raises(CheckpointError, match=line):
        Checkpoints(s3).latest()


def test_missing_credentials_and_buckets_are_one_line_at_once(
    s3: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(InvalidData, match="s3://no-such-bucket/run: there is no bucket no-such-bucket, or these"):
        Checkpoints("s3://no-such-bucket/run").latest()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    request.addfinalizer(forget_clients)
    forget_clients()
    object_server.faults.seen.clear()
    with pytest.raises(CheckpointError, match=r"cannot be listed \(Unable to locate credentials\)"):
        Checkpoints(s3).latest()
    assert object_server.faults.seen == []


def test_errors_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=abcdefgh;x")
    text = "no: AccountKey=abcdefgh;x at https://host/container/blob?sv=1&sig=abc%3D, again"
    assert redacted(text) == "no: *** at https://host/container/blob?*** again"

    def fail() -> None:
        raise PermissionError(text)

    with pytest.raises(PermissionError) as caught:
        attempted(fail)
    assert "sig=" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_uploads_of_a_rank_that_died_are_aborted_by_the_next_save_and_others_are_not(s3: str) -> None:
    path = location(s3)
    assert isinstance(path, ObjectPath)
    for name in ("step-00000007/rank-00001.safetensors", "notes/large.bin"):
        (path / name).request("create_multipart_upload")
    (path / "step-00000007" / "rank-00000.safetensors").store.pipe_file(
        f"{path.key}/step-00000007/rank-00000.safetensors", b"x"
    )
    (path / "notes").store.pipe_file(f"{path.key}/notes/thesis.txt", b"all of it")
    save(s3, steps=1)
    assert unfinished(path.key.split("/")[0]) == ["run/notes/large.bin"]
    assert objects(s3) == [
        "notes/thesis.txt",
        "step-00000001/manifest.json",
        "step-00000001/rank-00000.safetensors",
    ]


class Wide(nn.Module):
    """A model whose file has three parts of 5 MiB, the least that the driver's own file takes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3_000_000,), value))


@pytest.fixture
def _by_drivers_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write through the file that fsspec's driver opens, as to stores other than S3."""
    monkeypatch.setattr(ObjectPath, "has_parts", False)
    monkeypatch.setattr(upload, "FIRST_PART_BYTES", 5 * 2**20)


@pytest.mark.usefixtures("_by_drivers_file")
def test_a_file_of_the_driver_is_whole_or_nothing(s3: str, object_server: ObjectServer) -> None:
    Checkpoints(s3, asynchronous=False).save(Wide(1.0), step=1)
    object_server.faults.planned = [Fault(kind="error", pattern=r"PUT .*partNumber=2\b", times=10**9)]
    with pytest.raises(DiskFailed, match="step 2 was not written: rank 0: OSError"):
        Checkpoints(s3, asynchronous=False).save(Wide(2.0), step=2)
    # fsspec's file completes an upload when it is garbage, unless it was told not to.
    gc.collect()
    assert objects(s3) == ["step-00000001/manifest.json", "step-00000001/rank-00000.safetensors"]
    assert unfinished(s3.split("/")[2]) == []
    object_server.faults.clear()
    checkpoints, model = Checkpoints(s3), Wide(0.0)
    saved = checkpoints.latest()
    assert saved is not None
    checkpoints.load(saved, model)
    assert bool((model.weight == 1.0).all())


@pytest.mark.parametrize("store", ["memory", "local"], indirect=True)
def test_stores_without_parts_take_large_files_piece_by_piece(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PART_BYTES", 100)
    save(store, steps=2)
    assert loaded_step(store) == 2

    def fail(*_: Any) -> None:
        raise OSError("no more")

    monkeypatch.setattr(upload.Upload, "_end", fail)
    with pytest.raises(DiskFailed, match="step 3 was not written: rank 0: OSError: no more"):
        Checkpoints(store, asynchronous=False).save(model_at(3), step=3)
    assert {name.partition("/")[0] for name in objects(store)} == {"step-00000001", "step-00000002"}
