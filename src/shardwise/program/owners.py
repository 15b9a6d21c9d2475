"""The owner of each matrix, where an optimizer needs whole ones. No torch here."""

from collections.abc import Sequence
from math import prod

# A rank may own this many times the least possible maximum, for the sake of an equal share of the work.
_SLACK = 1.02


def assign_owners(
    shapes: Sequence[tuple[int, ...]], *, num_ranks: int, loads: Sequence[int] | None = None
) -> list[int]:
    """Return the owner of each matrix, so that no rank has much more state or work than another.

    First find the least limit of elements with which all matrices find a rank, largest first, each on the first rank
    that has room (multifit: Coffman, Garey, Johnson 1978). Then, within slightly more than that, give each to the rank
    with the least work, if all find room that way. `loads`: elements that ranks own already.

    Work is elements × the shorter side, as for the matrix products of Muon and Shampoo.
    """
    sizes = [prod(shape) for shape in shapes]
    work = [size * _shorter_side(shape) for size, shape in zip(sizes, shapes, strict=True)]
    none = [0] * len(sizes)
    held = list(loads) if loads is not None else [0] * num_ranks
    least = max((sum(sizes) + sum(held)) // num_ranks, *sizes, *held, 1)
    most = least + max(sizes, default=0)
    while (first := _pack(sizes, held, limit=most, work=none)) is None:
        most *= 2
    while least < most:
        limit = (least + most) // 2
        found = _pack(sizes, held, limit=limit, work=none)
        if found is None:
            least = limit + 1
        else:
            most, first = limit, found
    return _pack(sizes, held, limit=int(_SLACK * most), work=work) or first


def _pack(sizes: Sequence[int], held: Sequence[int], *, limit: int, work: Sequence[int]) -> list[int] | None:
    """Give each matrix, largest first, to the rank with room and the least work; return None if one finds no room."""
    total, done = list(held), [0] * len(held)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        with_room = [rank for rank in range(len(total)) if total[rank] + sizes[index] <= limit]
        if not with_room:
            return None
        owner = owners[index] = min(with_room, key=lambda rank: (done[rank], rank))
        total[owner] += sizes[index]
        done[owner] += work[index]
    return owners


def _shorter_side(shape: tuple[int, ...]) -> int:
    """Return the shorter side of a parameter as a matrix, whose columns are all dimensions after the first."""
    return min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1
