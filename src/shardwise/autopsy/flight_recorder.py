"""Reads dumps of PyTorch's flight recorder: the last collectives that a process has issued, one file per rank.

With TORCH_FR_BUFFER_SIZE set, NCCL's watchdog writes one when a collective times out. The files are pickles (or JSON)
from any source, so only plain values are read.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.autopsy.record import GroupRecord, Issued, RankRecord
from shardwise.errors import InvalidData
from shardwise.files.regular_file import read_at_most

# A dump of 2,000 collectives with their stacks takes about 2 MiB.
_MOST_BYTES = 1 << 28
_INVALID = (ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, pickle.UnpicklingError)
# Frames of the libraries between the user's code and the backend.
_LIBRARY = re.compile(r"[/\\](torch|shardwise)[/\\]")


class _PlainValues(pickle.Unpickler):
    """Unpickles only numbers, text, lists and dicts; a dump holds nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump holds plain values only")


def read_dump(path: Path) -> RankRecord:
    """Read one rank's record. Its rank is the number at the end of the file name, as PyTorch writes it."""
    number = re.search(r"(\d+)$", path.name.removesuffix(".json").removesuffix(".pickle"))
    if number is None:
        raise InvalidData(f"{path}: a flight recorder's dump ends in its rank, as nccl_trace_rank_0 does")
    try:
        content = read_at_most(path, _MOST_BYTES)
        found = json.loads(content) if content[:1] == b"{" else _PlainValues(io.BytesIO(content)).load()
        if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
            raise ValueError("it has no entries")
        return RankRecord(rank=int(number[1]), groups=_groups(found))
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror}") from error
    except _INVALID as error:
        raise InvalidData(f"{path} is not a dump of PyTorch's flight recorder: {error}") from error


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
