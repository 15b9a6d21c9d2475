"""A second copy of each snapshot on another node, so that everything is in memory somewhere after the loss of any node.

Nodes form a ring: each rank sends to one of the next node. Elements that another node holds anyway (replicas of the
mesh) are not sent: they stand last in a data file (two_generations.py), and what is sent is the beginning of it.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups.groups import job_timeout
from shardwise.state.recovery.finding import Nodes
from shardwise.state.recovery.generation import COPY, DataFile, NoRoom, Record, RecordName, data_name, size_of
from shardwise.state.recovery.memory_folder import MemoryFolder

_CHUNK_BYTES = 64 * 2**20


def buddy_of(rank: int, *, nodes: Nodes) -> int:
    """Return the rank of the next node that keeps a copy for this one."""
    names = nodes.names
    node = nodes.of_ranks[rank]
    others = nodes.ranks(names[(names.index(node) + 1) % len(names)])
    return others[nodes.ranks(node).index(rank) % len(others)]


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A copy that this rank keeps: its file, and its record if it is whole."""

    file: DataFile | None = None
    record: RecordName | None = None


class Buddies:
    """Sends this rank's snapshots to its buddy, and keeps those of the ranks whose buddy it is.

    Making it is collective. `exchange` runs in the thread of a snapshot, on a group of its own.
    """

    def __init__(self, folder: MemoryFolder, *, rank: int, nodes: Nodes) -> None:
        self._folder, self._rank = folder, rank
        self._group = dist.new_group(backend="gloo", timeout=job_timeout())
        everyone = range(len(nodes.of_ranks))
        self._buddy = buddy_of(rank, nodes=nodes)
        self._wards = [other for other in everyone if buddy_of(other, nodes=nodes) == rank]
        self._kept: dict[tuple[int, int], _Kept] = {}
        self.num_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all copies that this rank keeps for others."""
        return sum(kept.file.num_bytes for kept in self._kept.values() if kept.file is not None)

    def exchange(self, record: Record, memory: Tensor, *, slot: int, num_sent: int) -> None:
        """Send the first `num_sent` pieces, and receive those of others; all are whole when this returns."""
        copied = replace(
            record,
            name=replace(record.name, kind=COPY),
            data=data_name(start=record.name.start, slot=slot, rank=record.name.rank, kind=COPY),
            pieces=(*record.pieces[:num_sent], *(replace(piece, begin=None) for piece in record.pieces[num_sent:])),
        )
        self.num_bytes = size_of(copied.pieces)
        text = torch.frombuffer(bytearray(copied.to_text().encode()), dtype=torch.uint8)
        lengths = torch.tensor([text.numel(), self.num_bytes])
        sending = [dist.isend(part, dst=self._buddy, group=self._group) for part in (lengths, text)]
        sent = memory[: self.num_bytes]
        chunks = [sent[begin : begin + _CHUNK_BYTES] for begin in range(0, self.num_bytes, _CHUNK_BYTES)]
        sending += [dist.isend(chunk, dst=self._buddy, group=self._group) for chunk in chunks]
        problem: NoRoom | None = None
        for ward in self._wards:
            try:
                self._receive(ward, record.name, slot=slot)
            except NoRoom as error:
                problem = error
        for work in sending:
            if work is not None:
                work.wait()
        if problem is not None:
            raise problem

    def _receive(self, ward: int, name: RecordName, *, slot: int) -> None:
        kept = self._kept.setdefault((ward, slot), _Kept())
        if kept.record is not None:
            self._folder.remove(str(kept.record))
            kept.record = None
        lengths = torch.empty(2, dtype=torch.int64)
        dist.recv(lengths, src=ward, group=self._group)
        text = torch.empty(int(lengths[0]), dtype=torch.uint8)
        dist.recv(text, src=ward, group=self._group)
        num_bytes = int(lengths[1])
        problem: NoRoom | None = None
        try:
            memory = self._reserve(kept, ward, start=name.start, slot=slot, num_bytes=num_bytes).memory
        except NoRoom as error:
            # The sender must not wait for ever: what it sends is dropped.
            problem, memory = error, torch.empty(min(num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, num_bytes - begin)
            start = begin if problem is None else 0
            dist.recv(memory[start : start + length], src=ward, group=self._group)
        if problem is not None:
            raise problem
        kept.record = replace(name, rank=ward, kind=COPY)
        self._folder.write(str(kept.record), bytes(text.numpy()).decode())

    def _reserve(self, kept: _Kept, ward: int, *, start: str, slot: int, num_bytes: int) -> DataFile:
        if kept.file is None or kept.file.num_bytes != num_bytes:
            if kept.file is not None:
                self._folder.remove(kept.file.path.name)
                kept.file = None
            name = data_name(start=start, slot=slot, rank=ward, kind=COPY)
            kept.file = DataFile(self._folder.path / name, num_bytes=num_bytes)
        return kept.file

    def discard(self) -> None:
        """Remove the copies that this rank keeps."""
        for kept in self._kept.values():
            names = [str(kept.record)] if kept.record is not None else []
            self._folder.remove(*names, *([kept.file.path.name] if kept.file is not None else []))
        self._kept.clear()

    def leave(self) -> None:
        """Destroy the group. Collective."""
        dist.destroy_process_group(self._group)
