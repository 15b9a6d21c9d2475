"""Which rank owns which matrix, where an optimizer needs whole ones. No torch here."""

from collections.abc import Callable, Sequence
from math import prod

# How much more than the least that one rank must have it may have for the sake of an equal share of the work.
_SLACK = 1.02


def assign_owners(
    shapes: Sequence[tuple[int, ...]], *, num_ranks: int, loads: Sequence[int] | None = None
) -> list[int]:
    """The owner of each matrix, so that no rank has much more state or work than another.

    First the least limit of elements with which all matrices find a rank, largest first, each on the first rank that
    has room (multifit: Coffman, Garey, Johnson 1978). Then, within hardly more than that, each goes to the rank with
    the least work, if all find room that way. `loads`: elements that ranks own already.

    Of work there is no exact measure for any optimizer: elements × the shorter side, which is what the products of
    matrices in Muon and Shampoo take.
    """
    sizes = [prod(shape) for shape in shapes]
    held = list(loads) if loads is not None else [0] * num_ranks
    least = max((sum(sizes) + sum(held)) // num_ranks, *sizes, *held, 1)
    most = least + max(sizes, default=0)
    first = _pack(sizes, held, limit=most, prefer=lambda rank, _: rank)
    while first is None:
        most *= 2
        first = _pack(sizes, held, limit=most, prefer=lambda rank, _: rank)
    while least < most:
        limit = (least + most) // 2
        found = _pack(sizes, held, limit=limit, prefer=lambda rank, _: rank)
        if found is None:
            least = limit + 1
        else:
            most, first = limit, found
    work = [0] * num_ranks

    def least_work(rank: int, index: int | None) -> int:
        if index is not None:
            work[rank] += sizes[index] * _shorter_side(shapes[index])
        return work[rank]

    return _pack(sizes, held, limit=int(_SLACK * most), prefer=least_work) or first


def _pack(
    sizes: Sequence[int], held: Sequence[int], *, limit: int, prefer: Callable[[int, int | None], int]
) -> list[int] | None:
    """Largest first, each to the rank with room that is preferred most, which is told of it; None if one finds none."""
    total = list(held)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        with_room = [rank for rank in range(len(total)) if total[rank] + sizes[index] <= limit]
        if not with_room:
            return None
        owner = owners[index] = min(with_room, key=lambda rank: (prefer(rank, None), rank))
        prefer(owner, index)
        total[owner] += sizes[index]
    return owners


def _shorter_side(shape: tuple[int, ...]) -> int:
    """Of the matrix that a parameter is: what comes after its first dimension taken together."""
    return min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1
