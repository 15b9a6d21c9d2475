"""Reads an object by position: small reads come from what was read ahead, large ones from blocks side by side."""

from shardwise.base.files.object_path import ObjectPath

# Kept for each open file, of which there may be as many as ranks saved.
_READ_AHEAD_BYTES = 2**20


class ObjectReader:
    """An object that is open for reading."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.num_bytes = path.stat().st_size
        self._begin, self._block = 0, b""

    def read_into(self, memory: memoryview, *, begin: int) -> int:
        """Fill the memory, as far as the object reaches; return the number of bytes."""
        wanted = memory.cast("B")[: max(0, self.num_bytes - begin)]
        if len(wanted) > _READ_AHEAD_BYTES:
            at = 0
            for block in self._path.blocks(begin, begin + len(wanted)):
                wanted[at : at + len(block)] = block
                at += len(block)
            return at
        if not self._begin <= begin <= begin + len(wanted) <= self._begin + len(self._block):
            # Tensors are read in about the order in which they lie in the file.
            self._begin = begin
            self._block = (
                self._path.read_range(begin, min(begin + _READ_AHEAD_BYTES, self.num_bytes)) if wanted else b""
            )
        wanted[:] = self._block[begin - self._begin :][: len(wanted)]
        return len(wanted)
