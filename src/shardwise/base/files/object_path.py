"""Folders and objects of an object store (`s3://bucket/run`), through fsspec's drivers, with the methods of Path.

What is read is never cached: not a listing, not a size. A request that fails is tried again (attempts.py).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.base.errors import InvalidData, MissingExtra
from shardwise.base.files.attempts import attempted

# Protocol → package of the driver, extra that brings it, and where the driver finds credentials.
_DRIVERS: Mapping[str, tuple[str, str, str]] = {
    "s3": ("s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"),
    "gs": ("gcsfs", "gcs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("adlfs", "az", "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and _KEY"),
    "hf": ("huggingface_hub", "hf", "HF_TOKEN"),
}
# Neither is a store: they are for tests, and have folders that are made and removed.
_WITH_FOLDERS = ("memory", "local")

BLOCK_BYTES = 16 * 2**20
_PARALLEL_BLOCKS = 4
# Silent for this long, a connection is given up: as many parts as are under way may share a slow link.
_SILENT_SECONDS = 60


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """A folder or an object. `key` begins with the bucket; `store` is fsspec's file system."""

    protocol: str
    key: str
    store: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __truediv__(self, name: str) -> "ObjectPath":
        return replace(self, key=f"{self.key.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def has_parts(self) -> bool:
        """Return whether an upload is made of parts that go side by side, and that stay if nobody completes it."""
        return self.protocol == "s3"

    def sizes(self) -> dict[str, int]:
        """Return name → bytes of what is in the folder now, folders included; nothing if there is no such folder."""

        def look() -> Any:
            self.store.invalidate_cache()
            return self.store.ls(self.key, detail=True)

        try:
            found = attempted(look)
        except FileNotFoundError:
            self._require_bucket()
            return {}
        entries = ((str(entry["name"]).strip("/"), entry.get("size")) for entry in found)
        # A store may list a folder as an empty object of its own name.
        return {name.rpartition("/")[2]: size or 0 for name, size in entries if name != self.key.strip("/")}

    def _require_bucket(self) -> None:
        bucket = self.key.partition("/")[0]
        if self.protocol in ("s3", "gs", "az") and not attempted(lambda: self.store.exists(bucket)):
            raise InvalidData(
                f"{self}: there is no bucket {bucket}, or these credentials may not list it: create it, or correct "
                "the name"
            )

    def iterdir(self) -> Iterator["ObjectPath"]:
        return iter([self / name for name in self.sizes()])

    def _info(self) -> dict[str, Any]:
        def look() -> Any:
            self.store.invalidate_cache()
            return self.store.info(self.key)

        found: dict[str, Any] = attempted(look)
        return found

    def _type(self) -> str | None:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._type() is not None

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=int(self._info()["size"]))

    def read_range(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`."""
        found: bytes = attempted(lambda: self.store.cat_file(self.key, start=begin, end=end))
        return found

    def blocks(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `begin` to `end` in blocks; a few are read ahead, side by side."""
        pending: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(_PARALLEL_BLOCKS) as pool:
            for at in range(begin, end, BLOCK_BYTES):
                if len(pending) == _PARALLEL_BLOCKS:
                    yield pending.popleft().result()
                pending.append(pool.submit(self.read_range, at, min(at + BLOCK_BYTES, end)))
            while pending:
                yield pending.popleft().result()

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Make the folder where there are folders; in a store they are only the beginnings of names."""
        if self.protocol in _WITH_FOLDERS:
            self.store.makedirs(self.key, exist_ok=exist_ok)

    def rmdir(self) -> None:
        if self.protocol in _WITH_FOLDERS and self.is_dir():
            self.store.rmdir(self.key)

    def unlink(self) -> None:
        # Missing: an earlier attempt removed it, and its answer was lost.
        with suppress(FileNotFoundError):
            attempted(lambda: self.store.rm_file(self.key))

    def request(self, method: str, **arguments: Any) -> Any:
        """Call a method of the S3 API on this object."""
        bucket, key, _ = self.store.split_path(self.key)
        return attempted(partial(self.store.call_s3, method, Bucket=bucket, Key=key, **arguments))

    def abort_uploads(self) -> None:
        """Abort the uploads of objects whose names begin with this one, and that nobody completes."""
        if not self.has_parts:
            return
        bucket, prefix, _ = self.store.split_path(self.key)
        more: dict[str, str] = {}
        while True:
            listed = attempted(
                partial(self.store.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            )
            for upload in listed.get("Uploads", []):
                path = replace(self, key=f"{bucket}/{upload['Key']}")
                path.request("abort_multipart_upload", UploadId=upload["UploadId"])
            if not listed.get("IsTruncated"):
                return
            more = {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}


Location = Path | ObjectPath


def location(place: "str | PathLike[str] | ObjectPath") -> Location:
    """Return the place that a user names: a path, or a folder of an object store by its URL. `file://` is a path."""
    if isinstance(place, ObjectPath):
        return place
    text = fspath(place)
    if "://" not in text:
        protocol = text.partition(":/")[0]
        if protocol in _DRIVERS and protocol != text:
            raise InvalidData(f"{text}: Path drops a slash of a URL: give it as a string, {protocol}://…")
        return Path(text)
    protocol, _, rest = text.partition("://")
    check_url(text)
    return Path(rest) if protocol == "file" else ObjectPath(protocol, *_opened(text, protocol=protocol))


def check_url(place: str) -> None:
    """Raise InvalidData for a URL of a store that is not known, or that holds more than a place."""
    protocol, separator, rest = place.partition("://")
    if not separator:
        return
    if protocol not in (*_DRIVERS, *_WITH_FOLDERS, "file"):
        raise InvalidData(f"{protocol}:// is not a store for checkpoints; known: {', '.join(_DRIVERS)}, file")
    # The line must not show it: it may end up in a log.
    if ("@" in rest and ":" in rest.partition("@")[0]) or "?" in rest or "#" in rest:
        means = f": they come from {_DRIVERS[protocol][2]}" if protocol in _DRIVERS else ""
        raise InvalidData(f"{protocol}://…: a URL must not hold credentials or options{means}")
    if "::" in rest or not rest.strip("/"):
        raise InvalidData(f"{protocol}://{rest}: must be {protocol}://BUCKET/FOLDER")


def _opened(text: str, *, protocol: str) -> tuple[str, Any]:
    """Return the key and fsspec's file system of a URL."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol == "s3":
        # One layer of retries, ours: the driver's and its client's would multiply.
        config = {"read_timeout": _SILENT_SECONDS, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**config, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}
    try:
        store, key = fsspec.core.url_to_fs(text, **options)
    except ImportError as error:
        package, extra, _ = _DRIVERS[protocol]
        raise MissingExtra.of(package, needed_for=text, extra=extra) from error
    if protocol == "s3":
        store.retries = 1
    return key.rstrip("/"), store
