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
    """A part of a segment; `before` and `after` are its neighbours. While it is free, `entry` is that of its pool."""

    __slots__ = ("address", "after", "before", "entry", "pool", "size")

    def __init__(self, size: int, pool: "Pool", address: int) -> None:
        self.size = size
        self.pool = pool
        self.address = address
        self.entry: tuple[int, int, MemoryBlock] | None = None
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


Pool = list[tuple[int, int, MemoryBlock]]
"""The free blocks of a stream, small or large ones, as (size, address, block), sorted."""


class CachingAllocator:
    """Counts reserved and allocated bytes. A block may be larger than its request.

    A plan's steps are thousands of requests, for each batch that is tried. `allocate` and `free` are written out, since
    calls of smaller functions would take most of the time.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.most_reserved_bytes = 0
        self.allocated_bytes = 0
        self._num_segments = 0
        self._free: dict[tuple[str, bool], Pool] = {}

    def allocate(self, num_bytes: int, *, stream: str = "") -> MemoryBlock:
        size = -(-num_bytes // _ROUND) * _ROUND or _ROUND
        name = (stream, size <= SMALL_BYTES)
        pool = self._free.get(name)
        if pool is None:
            pool = self._free[name] = []
        place = bisect_left(pool, (size,))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(segment_bytes(size), pool=pool)
        block.entry = None
        left_over = block.size - size
        if left_over > SMALL_BYTES or (left_over and name[1]):
            rest = MemoryBlock(left_over, pool, block.address + size)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            block.size = size
            rest.entry = (left_over, rest.address, rest)
            insort(pool, rest.entry)
        self.allocated_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        pool, before, after = block.pool, block.before, block.after
        self.allocated_bytes -= block.size
        if before is not None and before.entry is not None:
            del pool[bisect_left(pool, before.entry)]
            block.size += before.size
            block.address = before.address
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and after.entry is not None:
            del pool[bisect_left(pool, after.entry)]
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
        block.entry = (block.size, block.address, block)
        insort(pool, block.entry)

    def _segment(self, size: int, *, pool: Pool) -> MemoryBlock:
        """Reserve a new segment, if necessary beyond the limit after giving back free segments."""
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            for one in self._free.values():
                kept = [item for item in one if item[2].before is not None or item[2].after is not None]
                self.reserved_bytes -= sum(item[0] for item in one) - sum(item[0] for item in kept)
                one[:] = kept
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._num_segments += 1
        return MemoryBlock(size, pool, -self._num_segments * _SEGMENT_GAP)


def segment_bytes(size: int) -> int:
    """Return the size of the segment for a request that no free block can serve."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < _LEAST_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
