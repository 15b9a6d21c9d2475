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
# Larger than the distance between any two addresses, which are negative.
_ALL_ADDRESSES = 2**64


class MemoryBlock:
    """A part of a segment; `before` and `after` are its neighbours. While it is free, `key` is that in its pool."""

    __slots__ = ("address", "after", "before", "key", "pool", "size")

    def __init__(self, size: int, pool: "FreeBlocks", address: int) -> None:
        self.size = size
        self.pool = pool
        self.address = address
        self.key = 0
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class FreeBlocks:
    """The free blocks of a stream, small or large ones: `keys` are sorted by size, then by address.

    A key is one number, since numbers are compared faster than tuples: size · 2⁶⁴ + address.
    """

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, MemoryBlock] = {}


class CachingAllocator:
    """Counts reserved and allocated bytes. A block may be larger than its request.

    A plan's steps are thousands of requests, for each batch that is tried. `allocate` and `free` are written out, since
    calls of smaller functions would take most of the time.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.most_reserved_bytes = 0
        self.allocated_bytes = 0
        self.num_segments = 0
        self._free: dict[tuple[str, bool], FreeBlocks] = {}

    def allocate(self, num_bytes: int, *, stream: str = "") -> MemoryBlock:
        size = -(-num_bytes // _ROUND) * _ROUND or _ROUND
        is_small = size <= SMALL_BYTES
        pool = self._free.get((stream, is_small))
        if pool is None:
            pool = self._free[stream, is_small] = FreeBlocks()
        keys = pool.keys
        # Addresses are negative, so that this is after all smaller blocks.
        place = bisect_left(keys, (size - 1) * _ALL_ADDRESSES)
        if place < len(keys):
            block = pool.blocks.pop(keys.pop(place))
            block.key = 0
        else:
            block = self._segment(segment_bytes(size), pool=pool)
        left_over = block.size - size
        if left_over > SMALL_BYTES or (left_over and is_small):
            address = block.address + size
            rest = MemoryBlock(left_over, pool, address)
            after = rest.after = block.after
            rest.before = block
            if after is not None:
                after.before = rest
            block.after = rest
            block.size = size
            rest.key = key = left_over * _ALL_ADDRESSES + address
            pool.blocks[key] = rest
            insort(keys, key)
        self.allocated_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        pool, before, after, size = block.pool, block.before, block.after, block.size
        keys = pool.keys
        self.allocated_bytes -= size
        if before is not None and before.key:
            del keys[bisect_left(keys, before.key)], pool.blocks[before.key]
            size += before.size
            block.address = before.address
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and after.key:
            del keys[bisect_left(keys, after.key)], pool.blocks[after.key]
            size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
        block.size = size
        block.key = key = size * _ALL_ADDRESSES + block.address
        pool.blocks[key] = block
        insort(keys, key)

    def _segment(self, size: int, *, pool: FreeBlocks) -> MemoryBlock:
        """Reserve a new segment, if necessary beyond the limit after giving back free segments."""
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            for one in self._free.values():
                for key in one.keys.copy():
                    block = one.blocks[key]
                    if block.before is None and block.after is None:
                        self.reserved_bytes -= block.size
                        one.keys.remove(key)
                        del one.blocks[key]
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self.num_segments += 1
        return MemoryBlock(size, pool, -self.num_segments * _SEGMENT_GAP)


def segment_bytes(size: int) -> int:
    """Return the size of the segment for a request that no free block can serve."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < _LEAST_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
