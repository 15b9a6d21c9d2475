"""A real S3 server on this machine (moto's), and faults that are put between it and its clients."""

import importlib.util
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.files.object_path import ObjectPath, location

_NUMBERS = itertools.count()
SECRET = "not-a-secret-0123456789"
needs_server = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto", "flask", "flask_cors")),
    reason="needs s3fs and moto's server: pip install -e '.[dev]'",
)


@dataclass(kw_only=True)
class Fault:
    """What happens to the next `times` requests whose "METHOD path?query" matches.

    error    answered with 500           slow    answered `seconds` later
    cut      the connection ends in the middle of the body
    lost     the server does what it is asked, and the connection ends before the answer
    """

    kind: str
    pattern: str
    times: int = 1
    seconds: float = 0.0


@dataclass
class Faults:
    """A WSGI application around the server's. `seen`: the requests; `most_parts`: so many parts came side by side."""

    app: Callable[..., Any]
    planned: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    most_parts: int = 0
    _parts: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.planned, self.seen, self.most_parts = [], [], 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        is_part = "partNumber=" in request
        with self._lock:
            self.seen.append(request)
            fault = next((one for one in self.planned if one.times and re.search(one.pattern, request)), None)
            if fault is not None:
                fault.times -= 1
            self._parts += is_part
            self.most_parts = max(self.most_parts, self._parts)
        try:
            return self._answer(environ, start_response, fault)
        finally:
            with self._lock:
                self._parts -= is_part

    def _answer(self, environ: dict[str, Any], start_response: Any, fault: Fault | None) -> Any:
        num_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        if fault is None or fault.kind == "slow":
            time.sleep(fault.seconds if fault is not None else 0)
            return self.app(environ, start_response)
        if fault.kind == "error":
            environ["wsgi.input"].read(num_bytes)
            start_response("500 Internal Server Error", [("Content-Type", "text/xml"), ("Content-Length", "0")])
            return [b""]
        if fault.kind == "cut":
            environ["wsgi.input"].read(num_bytes // 2)
        else:
            b"".join(self.app(environ, lambda *_: None))
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError


@dataclass(frozen=True, kw_only=True)
class ObjectServer:
    """The server, at a free port of 127.0.0.1."""

    port: int
    faults: Faults

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client finds in its environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "not-a-key-0123456789",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """Serve until the block ends."""
    import moto.s3.models
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        def log(self, *_: Any, **__: Any) -> None:
            pass

    # S3's own smallest part, 5 MiB, would make tests slow.
    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1
    faults = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, name="object server", daemon=True)
    thread.start()
    try:
        yield ObjectServer(port=server.server_port, faults=faults)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def forget_clients() -> None:
    """Have the next client read the environment again."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


@contextmanager
def client_of(environment: Mapping[str, str]) -> Iterator[None]:
    """Be a client of a server, in a rank."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    forget_clients()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_bucket(bucket: str) -> None:
    _client(bucket).call_s3("create_bucket", Bucket=bucket)


def unfinished(bucket: str) -> list[str]:
    """The keys of uploads that were begun in a bucket, and neither completed nor aborted."""
    found = _client(bucket).call_s3("list_multipart_uploads", Bucket=bucket)
    return [upload["Key"] for upload in found.get("Uploads", [])]


def _client(bucket: str) -> Any:
    path = location(f"s3://{bucket}/run")
    assert isinstance(path, ObjectPath)
    return path.store


def objects(url: str) -> list[str]:
    """The names of all objects in a folder of any store, without it."""
    path = location(url)
    assert isinstance(path, ObjectPath)
    store, key = path.store, path.key
    store.invalidate_cache()
    try:
        return sorted(name.removeprefix(key).lstrip("/") for name in store.find(key))
    except FileNotFoundError:
        return []


# Fixtures, for the conftest.py of a folder of tests.


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    with serving() as server:
        forget_clients()
        yield server
    # A client is kept from test to test: making one takes as long as a test.
    forget_clients()


@pytest.fixture
def s3(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder in a bucket of its own."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    object_server.faults.clear()
    bucket = f"bucket-{next(_NUMBERS)}"
    make_bucket(bucket)
    yield f"s3://{bucket}/run"
    object_server.faults.clear()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a folder, by the kind of store that the test names."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    return f"{request.param}://{tmp_path}/run"
