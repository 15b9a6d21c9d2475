"""A model of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), with its default settings.

Requests are rounded up to 512 bytes. Up to 1 MiB they are served from segments of 2 MiB; below 10 MiB from segments of
20 MiB; larger ones get their own segment, a multiple of 2 MiB. The smallest free block that is large enough is used,
and split if enough is left over; among equally large ones the one with the lowest address, usually in the newest
segment, because the driver assigns addresses downwards. A freed block is merged with its free neighbours and stays
reserved. Each stream has its own blocks. When the device is full, completely free segments are given back; only then
the allocator is out of memory.
"""

from bisect import bisect_left, insort

_MIB = 2**20
_ROUND = 512
SMALL_BYTES = 1 * _MIB
SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LEAST_OWN_SEGMENT = 10 * _MIB
_SEGMENT_ROUND = 2 * _MIB
# Distance between the addresses of two segments: larger than any segment.
_SEGMENT_GAP = 2**40


class MemoryBlock:
    """A part of a segment; `before` and `after` are its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, size: int, *, pool: tuple[str, bool], address: int) -> None:
        self.size = size
        self.pool = pool
        self.address = address
        self.is_free = False
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class CachingAllocator:
    """Counts reserved and allocated bytes. A block may be larger than its request."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.most_reserved_bytes = 0
        self.allocated_bytes = 0
        self._free: dict[tuple[str, bool], list[tuple[int, int, MemoryBlock]]] = {}
        self._num_segments = 0

    def allocate(self, num_bytes: int, *, stream: str = "") -> MemoryBlock:
        size = -(-num_bytes // _ROUND) * _ROUND or _ROUND
        pool = (stream, size <= SMALL_BYTES)
        free = self._free.get(pool)
        if free is None:
            free = self._free[pool] = []
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._segment(segment_bytes(size), pool=pool)
        left_over = block.size - size
        if left_over >= _ROUND if pool[1] else left_over > SMALL_BYTES:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        free = self._free[block.pool]
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                del free[bisect_left(free, (other.size, other.address))]
                self._merge(block, other)
        block.is_free = True
        insort(free, (block.size, block.address, block))

    def _segment(self, size: int, *, pool: tuple[str, bool]) -> MemoryBlock:
        """Reserve a new segment, if necessary beyond the limit after giving back free segments."""
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            for name, free in self._free.items():
                kept = [item for item in free if item[2].before is not None or item[2].after is not None]
                self.reserved_bytes -= sum(item[0] for item in free) - sum(item[0] for item in kept)
                self._free[name] = kept
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._num_segments += 1
        return MemoryBlock(size, pool=pool, address=-self._num_segments * _SEGMENT_GAP)

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(block.size - size, pool=block.pool, address=block.address + size)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        rest.is_free = True
        insort(self._free[block.pool], (rest.size, rest.address, rest))

    def _merge(self, block: MemoryBlock, other: MemoryBlock) -> None:
        block.size += other.size
        if other is block.before:
            block.address = other.address
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block


def segment_bytes(size: int) -> int:
    """Return the size of the segment for a request that no free block can serve."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < _LEAST_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
