"""The layout of a unit's parameters in its flat buffer.

Parameters lie end to end, each start aligned; the end is padded so that the buffer is cut into equal, aligned
slices. Rank i of the shard axis owns slice i; a parameter may lie across several.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

# In elements: 64 bytes of bf16 and 128 of fp32, so that kernels may load vectors and no two ranks share a line.
ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets and sizes in elements, which hold for every dtype of the buffer."""

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    num_elements: int
    num_slices: int

    @property
    def slice_elements(self) -> int:
        return self.num_elements // self.num_slices

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, number of elements) of each parameter."""
        return ((offset, prod(shape)) for offset, shape in zip(self.offsets, self.shapes, strict=True))

    def cut(self) -> "BufferCut":
        """Return the cut of the buffer into its parameters."""
        return cut_out([(offset, offset + size) for offset, size in self.sizes()], end=self.num_elements)

    def piece(self, number: int, *, num_pieces: int) -> "BufferPiece":
        """Return one of `num_pieces` pieces of the buffer: its share of every slice.

        After the piece is reduce-scattered, each rank has the sums of the same part of its slice.
        """
        start, stop = piece_of_slice(self.slice_elements, number=number, num_pieces=num_pieces)
        parts: list[tuple[int, int, int]] = []
        places: list[tuple[int, int]] = []
        for parameter, (offset, size) in enumerate(self.sizes()):
            for index in range(offset // self.slice_elements, -(-(offset + size) // self.slice_elements)):
                begin = index * self.slice_elements + start
                first, last = max(offset, begin), min(offset + size, begin + stop - start)
                if first < last:
                    parts.append((parameter, first - offset, last - offset))
                    moved = index * (stop - start) - begin
                    places.append((first + moved, last + moved))
        num_elements = self.num_slices * (stop - start)
        cut = cut_out(places, end=num_elements)
        is_last = number == num_pieces - 1
        return BufferPiece(
            start=start, stop=stop, num_elements=num_elements, is_last=is_last, parts=tuple(parts), cut=cut
        )

    def owned(self, index: int) -> list[tuple[int, int, int]]:
        """Return (parameter, start, stop) of each parameter in slice `index`, in elements from the slice's start."""
        return self.within(slice(index * self.slice_elements, (index + 1) * self.slice_elements))

    def within(self, part: slice) -> list[tuple[int, int, int]]:
        """Return (parameter, start, stop) of each parameter in a part of the buffer, in elements from the part's start.

        Parameters without an element in it are left out.
        """
        first, last = part.start, part.stop
        parts = []
        for parameter, (offset, size) in enumerate(self.sizes()):
            start, stop = max(offset, first), min(offset + size, last)
            if start < stop:
                parts.append((parameter, start - first, stop - first))
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCut:
    """Sizes that split a buffer into parts and the gaps between them, and the places of the parts among the pieces.

    One split by these sizes is several times as fast as a slice for each part.
    """

    sizes: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPiece:
    """The elements from `start` to `stop` of every slice, one slice after the other.

    parts   (parameter, start, stop) in elements of each parameter that lies in it, in the order of their places
    cut     the cut of the piece into these
    """

    start: int
    stop: int
    num_elements: int
    is_last: bool
    parts: tuple[tuple[int, int, int], ...]
    cut: BufferCut


def piece_of_slice(slice_elements: int, *, number: int, num_pieces: int) -> tuple[int, int]:
    """Return (start, stop) of one of `num_pieces` equal, aligned parts of a slice; of a small one some are empty."""
    start, stop = (
        place * slice_elements // num_pieces // ALIGNMENT * ALIGNMENT if place < num_pieces else slice_elements
        for place in (number, number + 1)
    )
    return start, stop


def cut_out(parts: Sequence[tuple[int, int]], *, end: int) -> BufferCut:
    """Return the cut of a buffer of `end` elements into parts, each (start, stop), in ascending order."""
    sizes: list[int] = []
    places: list[int] = []
    last = 0
    for start, stop in parts:
        if start > last:
            sizes.append(start - last)
        places.append(len(sizes))
        sizes.append(stop - start)
        last = stop
    if end > last:
        sizes.append(end - last)
    return BufferCut(sizes=tuple(sizes), places=tuple(places))


def lay_out(
    shapes: Sequence[tuple[int, ...]],
    *,
    num_slices: int,
    alignment: int = ALIGNMENT,
    num_wide: int = 0,
    width: int = 1,
) -> Layout:
    """Return the layout of parameters of these shapes in a buffer of `num_slices` slices.

    num_wide   of the first parameters, each element has room for `width` elements, and each parameter lies in one
               slice: so one layout serves a buffer of bytes, in which these have wider elements than the others, and
               buffers in which all are equally wide
    """
    room = [prod(shape) * (width if index < num_wide else 1) for index, shape in enumerate(shapes)]
    size = _round_up(sum(_round_up(one, alignment) for one in room), num_slices * alignment) // num_slices
    while True:
        offsets, end = _offsets(room, alignment=alignment, slice_elements=size if num_wide else 0, num_wide=num_wide)
        if end <= num_slices * size:
            break
        size = _round_up(max(-(-end // num_slices), size + 1), alignment)
    return Layout(shapes=tuple(shapes), offsets=tuple(offsets), num_elements=num_slices * size, num_slices=num_slices)


def _offsets(room: Sequence[int], *, alignment: int, slice_elements: int, num_wide: int) -> tuple[list[int], int]:
    """Return the offsets of parameters, and their end; the first `num_wide` do not cross from slice to slice."""
    offsets: list[int] = []
    end = 0
    for index, size in enumerate(room):
        if index < num_wide and size and end // slice_elements != (end + size - 1) // slice_elements:
            end = _round_up(end, slice_elements)
            if size > slice_elements:
                # It does not fit any slice of this size.
                return offsets, len(room) * size * (end + size)
        offsets.append(end)
        end = _round_up(end + size, alignment)
    return offsets, end


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
