"""A model of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), with its default settings.

Requests are rounded up to 512 bytes. Up to 1 MiB they are served from segments of 2 MiB; below 10 MiB from segments of
20 MiB; larger ones get their own segment, a multiple of 2 MiB. The smallest free block that is large enough is used,
and split if enough is left over; among equally large ones the one with the lowest address, usually in the newest
segment, because the driver assigns addresses downwards. A freed block is merged with its free neighbours and stays
reserved. Each stream has its own blocks. When the device is full, completely free segments are given back; only then
the allocator is out of memory.

With expandable segments a stream has one segment for small and one for large requests. It grows at its end, by pages of
2 or 20 MiB, so that no request needs a segment of its own and all free neighbours merge. The end, if it is free, is the
last block to be used. When the device is full, free pages are given back, also between blocks in use.
"""

from bisect import bisect_left
from collections.abc import Collection

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
# The address of an expandable segment.
_START = -(2**63)


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


class OutOfMemory(Exception):  # noqa: N818
    """More was requested than the device has."""


class FreeBlocks:
    """The free `blocks` of a stream, small or large ones, and their `keys`, sorted by size, then by address.

    A key is one number, since numbers are compared faster than tuples: size · 2⁶⁴ + address. Of an expandable segment,
    `last` is the block at its end, and `given_back` the numbers of pages within it that were given back.
    """

    __slots__ = ("blocks", "given_back", "keys", "last", "page")

    def __init__(self, page: int) -> None:
        self.keys: list[int] = []
        self.blocks: list[MemoryBlock] = []
        self.page = page
        self.last: MemoryBlock | None = None
        self.given_back: set[int] = set()

    def take(self, block: MemoryBlock) -> None:
        place = bisect_left(self.keys, block.key)
        block.key = 0
        del self.keys[place], self.blocks[place]


class CachingAllocator:
    """Counts reserved and allocated bytes. A block may be larger than its request. `expands`: its segments do.

    Beyond the limit it raises OutOfMemory if it `stops` there; otherwise it counts on.

    A plan's steps are thousands of requests, for each batch that is tried. `allocate` and `free` are written out, since
    calls of smaller functions would take most of the time.
    """

    def __init__(self, *, limit_bytes: int | None = None, expands: bool = False, stops: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expands = expands
        self.stops = stops
        # What is left of a large block is a block of its own if it is larger than this.
        self._unsplit = 0 if expands else SMALL_BYTES
        self.reserved_bytes = self.most_reserved_bytes = 0
        self.allocated_bytes = 0
        self.num_segments = 0
        self._free: dict[tuple[str, bool], FreeBlocks] = {}

    def allocate(self, num_bytes: int, stream: str = "") -> MemoryBlock:
        size = -(-num_bytes // _ROUND) * _ROUND or _ROUND
        is_small = size <= SMALL_BYTES
        pool = self._free.get((stream, is_small))
        if pool is None:
            pool = self._free[stream, is_small] = FreeBlocks(SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT)
        keys, blocks = pool.keys, pool.blocks
        # Addresses are negative, so that this is after all smaller blocks.
        place = bisect_left(keys, (size - 1) * _ALL_ADDRESSES)
        if place < len(keys):
            if blocks[place] is pool.last and place + 1 < len(keys):
                place += 1
            block = blocks.pop(place)
            block.key = 0
            del keys[place]
        elif self.expands:
            block = self._grown(size, pool=pool)
        else:
            block = self._segment(segment_bytes(size), pool=pool)
        left_over = block.size - size
        if left_over > self._unsplit or (left_over and is_small):
            address = block.address + size
            rest = MemoryBlock(left_over, pool, address)
            after = rest.after = block.after
            rest.before = block
            if after is not None:
                after.before = rest
            block.after = rest
            block.size = size
            rest.key = key = left_over * _ALL_ADDRESSES + address
            place = bisect_left(keys, key)
            keys.insert(place, key)
            blocks.insert(place, rest)
            if block is pool.last:
                pool.last = rest
        self.allocated_bytes += block.size
        if pool.given_back:
            self._take_back(block)
        return block

    def free(self, block: MemoryBlock) -> None:
        pool, before, after, size = block.pool, block.before, block.after, block.size
        keys, blocks = pool.keys, pool.blocks
        self.allocated_bytes -= size
        if before is not None and before.key:
            place = bisect_left(keys, before.key)
            del keys[place], blocks[place]
            size += before.size
            block.address = before.address
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and after.key:
            place = bisect_left(keys, after.key)
            del keys[place], blocks[place]
            size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
            elif pool.last is not None:
                pool.last = block
        block.size = size
        block.key = key = size * _ALL_ADDRESSES + block.address
        place = bisect_left(keys, key)
        keys.insert(place, key)
        blocks.insert(place, block)

    def _segment(self, size: int, *, pool: FreeBlocks) -> MemoryBlock:
        """Reserve a new segment."""
        self._reserve(size)
        self.num_segments += 1
        return MemoryBlock(size, pool, -self.num_segments * _SEGMENT_GAP)

    def _grown(self, size: int, *, pool: FreeBlocks) -> MemoryBlock:
        """Return the free end of an expandable segment, after it has grown to at least this size."""
        block = pool.last
        if block is None or not block.key:
            before, block = block, MemoryBlock(0, pool, _START if block is None else block.address + block.size)
            block.before = before
            if before is not None:
                before.after = block
        else:
            pool.take(block)
        more = -(-(size - block.size) // pool.page) * pool.page
        self._reserve(more)
        self.num_segments += 1
        block.size += more
        pool.last = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        """Reserve memory, if necessary beyond the limit after giving back what is free."""
        if self.limit_bytes is not None and self.reserved_bytes + num_bytes > self.limit_bytes:
            self.give_back()
            if self.stops and self.reserved_bytes + num_bytes > self.limit_bytes:
                raise OutOfMemory
        self.reserved_bytes += num_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)

    def give_back(self, *, without: Collection[str] = ()) -> None:
        """Give back what is completely free, but for these streams."""
        for (stream, _), pool in self._free.items():
            if stream in without:
                continue
            if self.expands:
                self._give_back_pages(pool)
            else:
                self._give_back_segments(pool)

    def _give_back_segments(self, pool: FreeBlocks) -> None:
        for block in pool.blocks.copy():
            if block.before is None and block.after is None:
                self.reserved_bytes -= block.size
                pool.take(block)

    def _give_back_pages(self, pool: FreeBlocks) -> None:
        for block in pool.blocks:
            start = block.address - _START
            pages = set(range(-(-start // pool.page), (start + block.size) // pool.page)) - pool.given_back
            self.reserved_bytes -= len(pages) * pool.page
            pool.given_back |= pages

    def _take_back(self, block: MemoryBlock) -> None:
        """Reserve the pages of a block again that were given back."""
        pool, start = block.pool, block.address - _START
        pages = pool.given_back.intersection(range(start // pool.page, -(-(start + block.size) // pool.page)))
        pool.given_back -= pages
        self._reserve(len(pages) * pool.page)


def segment_bytes(size: int) -> int:
    """Return the size of the segment for a request that no free block can serve."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < _LEAST_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
