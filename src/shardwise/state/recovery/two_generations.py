"""Two generations of one rank's snapshots, written in turn.

The caller begins generation n + 1 only when it knows that n is whole on all ranks (recovery.py), so one of the two is
always whole.
"""

import threading
import time
from dataclasses import replace

from shardwise.state.checkpoint.contents import StateSnapshot
from shardwise.state.checkpoint.late_numbers import LateNumbers
from shardwise.state.checkpoint.manifest import MODEL
from shardwise.state.checkpoint.manifest import OWN as OF_RANK
from shardwise.state.recovery.buddies import Buddies
from shardwise.state.recovery.copying import Copier, Copying, CopySource, pin, unpin
from shardwise.state.recovery.generation import (
    OWN,
    DataFile,
    Record,
    RecordName,
    begin_of,
    data_name,
    laid_out,
    size_of,
    with_total,
)
from shardwise.state.recovery.memory_folder import MemoryFolder

NUM_GENERATIONS = 2


class Snapshots:
    """Writes this rank's snapshots.

    whole        the step of the newest snapshot that is whole; -1 if there is none
    num_bytes    of one snapshot
    buddies      keep a second copy on another node, before the snapshot counts as whole
    """

    def __init__(self, folder: MemoryFolder, *, start: str, rank: int, num_ranks: int) -> None:
        self._folder, self._start, self._rank, self._num_ranks = folder, start, rank, num_ranks
        self._slots: list[DataFile | None] = [None] * NUM_GENERATIONS
        self._records: list[RecordName | None] = [None] * NUM_GENERATIONS
        self._next = 0
        self._copier = Copier()
        self._copying: Copying | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.buddies: Buddies | None = None
        self.whole = -1
        self.num_bytes = 0
        self.on_gpu = False
        # Of the last snapshot: seconds to make its files, CPU seconds of its thread, seconds until it was whole.
        self.reserve_seconds = self.thread_seconds = self.copy_seconds = 0.0

    def begin(self, taken: StateSnapshot, *, late: LateNumbers) -> None:
        """Begin to copy the state; raises NoRoom if it does not fit into the file system. See `snapshot` for `late`."""
        self.join()
        begun = time.perf_counter()
        slot, self._next = self._next, (self._next + 1) % NUM_GENERATIONS
        self._drop(slot)
        # First those that a buddy gets as well.
        taken = replace(taken, pieces=sorted(taken.pieces, key=lambda piece: piece.elsewhere))
        num_sent = sum(not piece.elsewhere for piece in taken.pieces)
        pieces = laid_out(taken.pieces)
        self.num_bytes = size_of(pieces)
        self.on_gpu = any(piece.elements.is_cuda for piece in taken.pieces)
        reserving = time.perf_counter()
        file = self._reserve(slot, num_bytes=self.num_bytes)
        if self.on_gpu and not file.pinned:
            file.pinned = pin(file.memory)
        self.reserve_seconds = time.perf_counter() - reserving
        begun += self.reserve_seconds
        # A forward changes buffers, and the loop its own values.
        early = {MODEL + name for name in taken.contents.buffers}
        sources = [
            CopySource(
                begin=begin_of(stored),
                elements=piece.elements,
                early=piece.name in early or piece.name.startswith(OF_RANK),
            )
            for piece, stored in zip(taken.pieces, pieces, strict=True)
        ]
        self._copying = self._copier.begin(sources, memory=file.memory, numbers=late.copies())
        name = RecordName(
            step=taken.contents.step, start=self._start, rank=self._rank, num_ranks=self._num_ranks, kind=OWN
        )
        record = Record(name=name, data=file.path.name, contents=taken.contents, pieces=tuple(pieces))
        self._thread = threading.Thread(
            target=self._finish,
            args=(record, slot, num_sent, begun, late),
            name=f"snapshot of step {name.step}",
            daemon=True,
        )
        self._thread.start()

    def _finish(self, record: Record, slot: int, num_sent: int, begun: float, late: LateNumbers) -> None:
        cpu = time.thread_time()
        try:
            assert self._copying is not None
            self._copying.finish()
            late.fill()
            file = self._slots[slot]
            assert file is not None
            pieces = tuple(with_total(piece, memory=file.memory) for piece in record.pieces)
            record = replace(record, pieces=pieces)
            self._folder.write(str(record.name), record.to_text())
            self._records[slot] = record.name
            if self.buddies is not None:
                self.buddies.exchange(record, file.memory, slot=slot, num_sent=num_sent)
            self.thread_seconds = time.thread_time() - cpu
            self.copy_seconds = time.perf_counter() - begun
            self.whole = record.name.step
        except BaseException as error:
            self._failure = error

    @property
    def host_bytes(self) -> int:
        """Bytes of all files that this rank has made for itself."""
        return sum(file.num_bytes for file in self._slots if file is not None)

    def _reserve(self, slot: int, *, num_bytes: int) -> DataFile:
        """Return the file of a slot; make another one if the size of the state has changed."""
        file = self._slots[slot]
        if file is None or file.num_bytes != num_bytes:
            self._release(slot)
            name = data_name(start=self._start, slot=slot, rank=self._rank, kind=OWN)
            file = self._slots[slot] = DataFile(self._folder.path / name, num_bytes=num_bytes)
        return file

    def _drop(self, slot: int) -> None:
        """Remove a slot's record: from now on its data change."""
        record, self._records[slot] = self._records[slot], None
        if record is not None:
            self._folder.remove(str(record))

    def _release(self, slot: int) -> None:
        file, self._slots[slot] = self._slots[slot], None
        if file is not None:
            if file.pinned:
                unpin(file.memory)
            self._folder.remove(file.path.name)

    def lost_seconds(self, step_seconds: float) -> float:
        """Return the time that the last snapshot took from a GPU, once it is whole."""
        return self._copying.lost_seconds(step_seconds) if self._copying is not None else 0.0

    def release_sources(self) -> None:
        """Return when the state may be written again."""
        if self._copying is not None:
            self._copying.release_sources()

    def join(self) -> None:
        """Wait until the pending snapshot is whole; raise an error that occurred in its thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise an error that occurred in a snapshot's thread."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Remove all snapshots that this rank has written, and give back their memory."""
        self.join()
        for slot in range(NUM_GENERATIONS):
            self._drop(slot)
            self._release(slot)
        if self.buddies is not None:
            self.buddies.discard()
        self.whole = -1
