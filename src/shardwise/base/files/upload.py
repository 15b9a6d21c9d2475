"""Objects that are being written. One exists, whole, when `complete` returns; discarded, it leaves nothing.

    write ──▶ a part, until it is full ──▶ at most 8 parts under way, each tried again if it fails ──▶ complete

S3 takes parts side by side: memory is at most 9 parts, 72 MiB. Other stores take one after another, through the file
that their driver opens.
"""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from shardwise.base.files.attempts import attempted
from shardwise.base.files.object_path import ObjectPath

PARALLEL_PARTS = 8
FIRST_PART_BYTES = 8 * 2**20
# An upload has at most 10,000 parts. Those of a file of more than 15 GiB get larger, so that it may have 480 GiB.
_PARTS_OF_ONE_SIZE = 2000


def part_bytes(number: int) -> int:
    """Return the size of a part; numbers begin at 0."""
    return int(FIRST_PART_BYTES * 2 ** (number // _PARTS_OF_ONE_SIZE))


class Upload:
    """An object that is written by the driver of its store. A small one is put at once."""

    def __init__(self, path: ObjectPath) -> None:
        self.name = str(path)
        self._path = path
        self._buffer = bytearray()
        self._num_bytes, self._num_sent = 0, 0
        self._file: Any = None

    def write(self, data: memoryview) -> int:
        """Take as much of the data as fits into the part; return how much."""
        size = part_bytes(self._num_sent)
        taken = data.cast("B")[: size - len(self._buffer)]
        self._buffer += taken
        self._num_bytes += len(taken)
        if len(self._buffer) == size:
            self._send_part()
        return len(taken)

    def complete(self) -> None:
        if self._num_sent == 0:
            attempted(lambda: self._path.store.pipe_file(self._path.key, bytes(self._buffer)))
            return
        if self._buffer:
            self._send_part()
        self._end()

    def _send_part(self) -> None:
        body, self._buffer = self._buffer, bytearray()
        self._send(body)
        self._num_sent += 1

    def _send(self, body: bytearray) -> None:
        store = self._path.store
        if self._file is None:
            self._file = attempted(lambda: store.open(self._path.key, "wb", block_size=FIRST_PART_BYTES))
        # Once: a driver's file keeps what it failed to send, and has tried again by itself.
        attempted(lambda: self._file.write(body), most=1)

    def _end(self) -> None:
        attempted(self._file.close, most=1)

    def discard(self) -> None:
        """Give up the upload; what has arrived of it is removed, as far as possible."""
        if self._file is None:
            return
        from fsspec.spec import AbstractBufferedFile

        if isinstance(self._file, AbstractBufferedFile):
            with suppress(Exception):
                self._file.discard()
            # Otherwise it would complete the upload when it is garbage.
            self._file.closed = True
        else:
            self._file.close()
        with suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Release what the process holds. Nothing is completed by it."""


class PartedUpload(Upload):
    """An object of S3, in parts that go side by side."""

    def __init__(self, path: ObjectPath) -> None:
        super().__init__(path)
        self._id: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._pool = ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="upload")

    def _send(self, body: bytearray) -> None:
        if self._id is None:
            self._id = self._path.request("create_multipart_upload")["UploadId"]
        pending = [part for part in self._parts if not part.done()]
        if len(pending) >= PARALLEL_PARTS:
            wait(pending, return_when=FIRST_COMPLETED)
        for part in self._parts:
            if part.done():
                # What has failed ends the save now, not after the last part.
                part.result()
        self._parts.append(self._pool.submit(self._upload, len(self._parts) + 1, body))

    def _upload(self, number: int, body: bytearray) -> dict[str, Any]:
        sent = self._path.request("upload_part", UploadId=self._id, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    def _end(self) -> None:
        parts = [part.result() for part in self._parts]
        try:
            self._path.request("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # Completed by an attempt whose answer was lost, if the object is there: its name was free before.
            if self._path.stat().st_size != self._num_bytes:
                raise

    def discard(self) -> None:
        # A part that arrives after the abort would stay.
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._id is not None:
            with suppress(OSError):
                self._path.request("abort_multipart_upload", UploadId=self._id)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def upload_to(path: ObjectPath) -> Upload:
    """Begin to write an object."""
    return PartedUpload(path) if path.has_parts else Upload(path)
