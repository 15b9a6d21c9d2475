"""Output of nccl-tests (all_reduce_perf, all_gather_perf, reduce_scatter_perf) → rows in the form of `calibrate`.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
         8388608       2097152     float     sum      -1    113.2   74.10  129.68      0    112.9   74.30  130.03      0

algbw is size / time; busbw counts the bytes that one rank sends. A file holds one collective.
"""

import re
from pathlib import Path
from typing import Any

from shardwise.base.errors import InvalidData
from shardwise.base.files.data_file import UnreadableFile, read_text


def read_nccl_tests(path: str | Path) -> list[dict[str, Any]]:
    """Return one row per size, with the faster of the out-of-place and the in-place time."""
    try:
        text = read_text(path)
    except UnreadableFile as error:
        raise InvalidData(f"{path}: {error}") from error
    num_ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, flags=re.MULTILINE))
    table = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]", line)]
    rows = [(int(words[0]), _timings(words)) for words in table]
    rows = [(num_bytes, timings) for num_bytes, timings in rows if num_bytes and timings]
    if not rows or num_ranks < 2:
        raise InvalidData(
            f"{path}: holds no table of nccl-tests with two ranks or more; give it what all_reduce_perf, "
            "all_gather_perf or reduce_scatter_perf printed"
        )
    name = _collective(rows[-1][1][0], redop=table[-1][3])
    return [
        {
            "name": name,
            "num_ranks": num_ranks,
            "num_bytes": num_bytes,
            "seconds": min(time for time, _, _ in timings) / 1e6,
        }
        for num_bytes, timings in rows
    ]


def _timings(words: list[str]) -> list[tuple[float, float, float]]:
    """Return (time, algbw, busbw), out of place and in place; the column #wrong may be missing, or N/A."""
    numbers = words[5:]
    width = 4 if len(numbers) in (4, 8) else 3
    try:
        groups = [[float(number) for number in numbers[start : start + 3]] for start in range(0, len(numbers), width)]
    except ValueError:
        return []
    return [(group[0], group[1], group[2]) for group in groups if len(group) == 3]


def _collective(timing: tuple[float, float, float], *, redop: str) -> str:
    """Return the collective by busbw / algbw: 2(n−1)/n ≥ 1 for an all-reduce of n ranks, half of that for others."""
    _, algorithm, bus = timing
    if bus > 0.99 * algorithm:
        return "all_reduce"
    return "all_gather" if redop == "none" else "reduce_scatter"
