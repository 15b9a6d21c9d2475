"""Draws the ring all-reduce, chunk by chunk: the algorithm of comm/groups/ring.py on names instead of numbers.

Each rank sends only to its right neighbour. In the n-1 rounds of the reduce-scatter a rank adds what arrives, so that
rank r ends with the complete sum of chunk r. In the n-1 rounds of the all-gather it keeps what arrives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

_PARTS = ("reduce-scatter", "all-gather")
_MEANINGS = ("what arrives is added; rank r ends with the sum of chunk r", "what arrives is kept as it is")
_WIDTH = 80
# Up to this many ranks, a cell names its summands; then it counts them; then its height shows their number.
_MAX_LETTERS = 5
_MAX_COUNTED = 8
_MAX_DRAWN = 32
_LEVELS = "▁▂▃▄▅▆▇█"

Sum = tuple[int, ...]
"""The ranks whose values are added up, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: the chunk that each rank sends, and what the ranks have afterwards."""

    part: str
    number: int
    sent: tuple[int, ...]
    cells: tuple[tuple[Sum, ...], ...]

    def received(self, rank: int) -> int:
        """Return the chunk that a rank received from its left neighbour."""
        return self.sent[rank - 1]


def first_cells(num_ranks: int) -> tuple[tuple[Sum, ...], ...]:
    """Return cells[rank][chunk] before anything is sent: each rank has its own values."""
    return tuple(tuple((rank,) for _ in range(num_ranks)) for rank in range(num_ranks))


def rounds(num_ranks: int) -> Iterator[Round]:
    """Yield the rounds. Rank r sends chunk r-1 first, and then what it received in the round before."""
    cells = [list(row) for row in first_cells(num_ranks)]
    sent = [(rank - 1) % num_ranks for rank in range(num_ranks)]
    for part in _PARTS:
        for number in range(1, num_ranks):
            arriving = [cells[rank - 1][sent[rank - 1]] for rank in range(num_ranks)]
            received = [sent[rank - 1] for rank in range(num_ranks)]
            for rank, chunk in enumerate(received):
                adds = part == _PARTS[0]
                cells[rank][chunk] = arriving[rank] + cells[rank][chunk] if adds else arriving[rank]
            yield Round(part=part, number=number, sent=tuple(sent), cells=tuple(map(tuple, cells)))
            sent = received


def explain_ring(*, num_ranks: int) -> list[str]:
    """Draw the rounds, 80 columns wide: only some of them for many ranks, only the numbers for very many."""
    if num_ranks == 1:
        return ["ring all-reduce on 1 rank: what it has is the sum, and nothing is sent"]
    lines = [
        f"ring all-reduce on {num_ranks} ranks: each cuts its values into as many chunks,",
        "and in every round sends one of them to the next rank (the last one to rank 0)",
    ]
    if num_ranks <= _MAX_DRAWN:
        lines += [*_legend(num_ranks), ""]
        for part, meaning in zip(_PARTS, _MEANINGS, strict=True):
            chosen = [round_ for round_ in rounds(num_ranks) if round_.part == part]
            lines += [f"── {part}: {meaning} ".ljust(_WIDTH, "─"), *_bands(chosen, num_ranks=num_ranks)]
    else:
        lines += [f"(the rounds are drawn for up to {_MAX_DRAWN} ranks)", ""]
    half = (num_ranks - 1) / num_ranks
    rounds_ = "1 round" if num_ranks == 2 else f"{num_ranks - 1} rounds"
    return [
        *lines,
        f"each half takes {rounds_}, and in each a rank sends 1/{num_ranks} of the bytes:",
        f"  reduce-scatter   (n-1)/n = {half:.3f} of the bytes",
        f"  all-gather       (n-1)/n = {half:.3f}",
        f"  all-reduce      2(n-1)/n = {2 * half:.3f}, less than 2 however many ranks there are",
    ]


def ring_as_data(*, num_ranks: int) -> dict[str, Any]:
    """Return every round for JSON: the chunk that each rank sends, and the summands of what it then has.

    `rounds` is None if there are too many ranks.
    """
    data = [
        {
            "part": round_.part,
            "round": round_.number,
            "sent": list(round_.sent),
            "summands": [[sorted(cell) for cell in row] for row in round_.cells],
        }
        for round_ in (rounds(num_ranks) if num_ranks <= _MAX_DRAWN else ())
    ]
    is_drawn = num_ranks <= _MAX_DRAWN
    return {"ranks": num_ranks, "rounds": data if is_drawn else None, "sent_of_bytes": 2 * (num_ranks - 1) / num_ranks}


def _legend(num_ranks: int) -> list[str]:
    if num_ranks <= _MAX_LETTERS:
        total = "+".join(ascii_lowercase[:num_ranks])
        return [f"a: rank 0's values, b: rank 1's; Σ: {total}; + and = mark what just arrived"]
    if num_ranks <= _MAX_COUNTED:
        return [f"2: the sum of two ranks' values; Σ: of all {num_ranks}; + and = mark what just arrived"]
    return [f"the higher, the more ranks' values a chunk is the sum of; █: of all {num_ranks}"]


def _bands(chosen: list[Round], *, num_ranks: int) -> Iterator[str]:
    """Draw rounds side by side, as many as fit; for many ranks only the first, the middle and the last round."""
    label_width = len(f"rank {num_ranks - 1}") + 3
    panel_width = num_ranks * _cell_width(num_ranks) + 2
    in_a_band = (_WIDTH - label_width) // panel_width
    if num_ranks > _MAX_COUNTED:
        chosen = [*chosen[:1], chosen[len(chosen) // 2], chosen[-1]][-in_a_band:]
    for first in range(0, len(chosen), in_a_band):
        band = chosen[first : first + in_a_band]
        heads = (f"round {round_.number} of {num_ranks - 1}".ljust(panel_width) for round_ in band)
        yield (" " * label_width + "".join(heads)).rstrip()
        if num_ranks <= _MAX_COUNTED:
            chunks = "".join(f" {chunk}".ljust(_cell_width(num_ranks)) for chunk in range(num_ranks))
            yield ("  chunk".ljust(label_width) + "  ".join(chunks for _ in band)).rstrip()
        for rank in range(num_ranks):
            panels = ("".join(_cells(round_, rank=rank)) for round_ in band)
            yield (f"  rank {rank}".ljust(label_width) + "  ".join(panels)).rstrip()
        yield ""


def _cells(round_: Round, *, rank: int) -> Iterator[str]:
    num_ranks = len(round_.cells)
    for chunk, summands in enumerate(round_.cells[rank]):
        if num_ranks > _MAX_COUNTED:
            yield _LEVELS[(len(summands) - 1) * (len(_LEVELS) - 1) // (num_ranks - 1)]
            continue
        arrived = ("+" if round_.part == _PARTS[0] else "=") if chunk == round_.received(rank) else " "
        yield (arrived + _name(summands, num_ranks=num_ranks)).ljust(_cell_width(num_ranks))


def _name(summands: Sum, *, num_ranks: int) -> str:
    if len(summands) == num_ranks:
        return "Σ"
    if num_ranks > _MAX_LETTERS:
        return str(len(summands))
    return "".join(ascii_lowercase[rank] for rank in sorted(summands))


def _cell_width(num_ranks: int) -> int:
    if num_ranks > _MAX_COUNTED:
        return 1
    return num_ranks + 1 if num_ranks <= _MAX_LETTERS else 3
