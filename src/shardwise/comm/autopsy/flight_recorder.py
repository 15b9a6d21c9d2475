"""Reads dumps of PyTorch's flight recorder: the last collectives that a process has issued, one file per rank.

With TORCH_FR_BUFFER_SIZE set, NCCL's watchdog writes one when a collective times out. The files are pickles (or JSON)
from any source, so only plain values are read.
"""

import pickle
import pickletools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import InvalidData
from shardwise.base.files.data_file import UnreadableFile, check_values, parse_json, read_content
from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord

# A dump of 2,000 collectives with their stacks takes about 2 MiB.
_MOST_BYTES = 1 << 26
_MOST_VALUES = 5_000_000
_INVALID = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError, pickle.UnpicklingError),
    UnreadableFile,
)
# The instructions of a pickle that make plain values. Others call something, or make room for a length that the file
# only claims.
_PLAIN = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    )
)
# Frames of the libraries between the user's code and the backend.
_LIBRARY = re.compile(r"[/\\](torch|shardwise)[/\\]")


def _plain_values(content: bytes) -> Any:
    """Return what a pickle of numbers, text, lists and dicts holds; a dump holds nothing else."""
    for count, (code, argument, _) in enumerate(pickletools.genops(content)):
        if code.name not in _PLAIN:
            raise ValueError(f"it has the instruction {code.name}, and a dump holds plain values only")
        # Python's reader makes room for all numbers up to that of a stored value.
        if count >= _MOST_VALUES or ("PUT" in code.name and int(argument or 0) > count):
            raise ValueError(f"it stores more than {_MOST_VALUES:,} values, or a value under a number of none")
    return pickle.loads(content)


def read_dump(path: Path) -> RankRecord:
    """Read one rank's record. Its rank is the number at the end of the file name, as PyTorch writes it."""
    number = re.search(r"(\d+)$", path.name.removesuffix(".json").removesuffix(".pickle"))
    if number is None:
        raise InvalidData(f"{path}: a flight recorder's dump ends in its rank, as nccl_trace_rank_0 does")
    try:
        content = read_content(path, most_bytes=_MOST_BYTES)
        found = parse_json(content) if content[:1] == b"{" else _plain_values(content)
        check_values(found, finite=True, most_values=_MOST_VALUES)
        if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
            raise ValueError("it has no entries")
        return RankRecord(rank=int(number[1]), groups=_groups(found))
    except _INVALID as error:
        why = " ".join(str(error).split())[:200]
        raise InvalidData(f"{path} is not a dump of PyTorch's flight recorder: {why}") from error


def _groups(found: Mapping[str, Any]) -> dict[str, GroupRecord]:
    issued: dict[str, dict[int, Issued]] = {}
    for entry in found["entries"]:
        if entry.get("is_p2p"):
            # Sends and receives between two ranks are numbered separately.
            continue
        name, description = entry["process_group"]
        one = Issued(
            number=int(entry["collective_seq_id"]),
            name=_name(entry),
            ended=entry.get("state") == "completed" or bool(entry.get("retired")),
            place=_place(entry.get("frames") or []),
        )
        issued.setdefault(str(description or name), {})[one.number] = one
    members = {str(config.get("desc") or key): config for key, config in (found.get("pg_config") or {}).items()}
    return {
        group: GroupRecord(ranks=_ranks(members.get(group, {})), issued=[numbered[key] for key in sorted(numbered)])
        for group, numbered in issued.items()
    }


def _ranks(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the members of a group, which torch writes as text: `[0, 1]`."""
    ranks = config.get("ranks", ())
    return tuple(map(int, re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks))


def _name(entry: Mapping[str, Any]) -> str:
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = [" × ".join(map(str, size)) or "one number" for size in entry.get("input_sizes") or ()]
    dtypes = [str(dtype) for dtype in entry.get("input_dtypes") or ()]
    return " ".join([operation, ", ".join(sizes), "/".join(sorted(set(dtypes)))]).strip()


def _place(frames: list[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's code. The innermost frame comes first."""
    for frame in frames:
        if not _LIBRARY.search(str(frame["filename"])):
            return f"{Path(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"
    return ""
