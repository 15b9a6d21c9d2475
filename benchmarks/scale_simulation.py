"""What a job of thousands of ranks costs each rank: one process plays the ranks in turn.

    PYTHONPATH=src python benchmarks/scale_simulation.py                   Llama-405B, 8 to 16,384 ranks
    PYTHONPATH=src python benchmarks/scale_simulation.py --ranks 8 64 --model llama-3.1-8b

Tensors are on the meta device; everything else is the code that a job runs, with the messages of other ranks handed to
it in memory. Seconds are of the CPU:

    joining      requests to the job's store, of the rank that makes most
    agreeing     messages that a rank sends to compare a number with all others (order check, plans, flags of a save)
    flags        seconds to write and check the first of the used flags, with the order check in it (same_order.py)
    prepare      seconds of shardwise.prepare on meta, fsdp
    saving       seconds in which a rank describes its file, of the slowest of 64 ranks
    manifest     seconds of rank 0: merging what it receives, writing the manifest and reading it again; its size
    loading      seconds in which a rank, of another number of ranks, plans what it reads; the slowest of those played
    memory       most memory of the process, less what it had after its imports

Up to 512 ranks, all are played in a save, each of which merges what it receives. Of more ranks, those are played that
send to rank 0; what the ranks behind them have merged is computed, in a way that the play of fewer ranks is checked
against.

`--listed` plays what a save did before: the manifest lists every box (version 1).
"""

import argparse
import json
import math
import pickle
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import shardwise
from shardwise.base.vocabulary.layout import Layout
from shardwise.comm.groups import small_collectives
from shardwise.comm.groups.groups import Group
from shardwise.comm.job import rendezvous
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.engine.engine import engine_of
from shardwise.engine.guards.same_order import coefficient, count_bits
from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.state.checkpoint.boxes import Boxes
from shardwise.state.checkpoint.contents import Contents, StatePiece
from shardwise.state.checkpoint.manifest import (
    FILE_NAME,
    MODEL,
    OPTIMIZER,
    Manifest,
    StoredFile,
    StoredTensor,
    file_of,
    read_manifest,
)
from shardwise.state.checkpoint.parts import CheckpointPart, describe_pieces
from shardwise.state.checkpoint.slice_runs import SliceRun, merged_runs

RANKS = (8, 64, 512, 4096, 16_384)
STATES = ("exp_avg", "exp_avg_sq")
# Of a save.
MOST_PLAYED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The names of a flat buffer's parameters, and its layout."""

    names: tuple[str, ...]
    layout: Layout


# Joining a job, and comparing a number


class CountingStore:
    """A store in memory that counts the requests of the rank that is played."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self.rank = 0

    def set(self, key: str, value: str) -> None:
        self.requests[self.rank] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests[self.rank] += 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.requests[self.rank] += len(keys)
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.requests[self.rank] += 1
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value


def joining(num_ranks: int) -> int:
    """Play the join, where each rank looks around once per turn; return the requests of the rank that made most."""
    store = CountingStore()
    places = []
    for rank in range(num_ranks):
        store.rank = rank
        places.append(rendezvous._Place(store, rank=rank, num_ranks=num_ranks))  # type: ignore[arg-type]
    waiting = list(enumerate(places))
    while waiting:
        before, waiting = waiting, []
        for rank, place in before:
            store.rank = rank
            place.pass_on()
            if not place.is_complete():
                waiting.append((rank, place))
    return max(store.requests.values())


def agreeing(num_ranks: int, *, rank: int) -> int:
    """Play one rank of `largest`, where rank r gives r; return how many messages it sends."""
    sent: list[int] = []

    class Sent:
        def wait(self) -> None:
            pass

    def isend(numbers: torch.Tensor, *, dst: int, group: object) -> Sent:
        # It knows the largest of the 2^i ranks up to its own.
        assert int(numbers[0]) == _largest_of(rank, 2 ** len(sent), num_ranks=num_ranks)
        sent.append(dst)
        return Sent()

    def recv(numbers: torch.Tensor, *, src: int, group: object) -> None:
        numbers[0] = _largest_of(src, 2 ** (len(sent) - 1), num_ranks=num_ranks)

    group = Group(handle=None, ranks=tuple(range(num_ranks)), index=rank)  # type: ignore[arg-type]
    dist = small_collectives.dist
    with (
        patch.object(dist, "isend", isend),
        patch.object(dist, "recv", recv),
        patch.object(dist, "get_backend", lambda handle: "gloo"),
    ):
        assert small_collectives.largest([rank], group=group) == [num_ranks - 1]
    return len(sent)


def _largest_of(last: int, count: int, *, num_ranks: int) -> int:
    """The largest of `count` ranks that end with `last`, around the circle."""
    first = last - count + 1
    return last if first >= 0 and count < num_ranks else num_ranks - 1


def flags(num_ranks: int) -> float:
    """Seconds of a rank's part of the order check and of counting the ranks that used a parameter."""
    begun = time.process_time()
    rank = num_ranks - 1
    assert coefficient(rank, num_ranks=num_ranks) % 2
    bits = count_bits(num_ranks)
    value = (12345 * coefficient(rank, num_ranks=num_ranks) << bits) + 1 & 0xFFFFFFFF
    assert num_ranks < 1 << bits
    assert value & (1 << bits) - 1 == 1
    return time.process_time() - begun


# Preparing


def prepared(name: str, *, num_ranks: int) -> tuple[list[Flat], float]:
    """Prepare rank 0 on meta; return its flat buffers and the seconds of prepare."""
    with absent_group(num_ranks):
        model = build_model(shape_of(name), device="meta")
        optimizer = torch.optim.AdamW(model.parameters())
        begun = time.process_time()
        shardwise.prepare(
            model, optimizer, shardwise.Plan(strategy="fsdp"), device="meta", collectives=AbsentCollectives()
        )
        seconds = time.process_time() - begun
        return [Flat(names=tuple(flat.names), layout=flat.layout) for flat in engine_of(model).core.flats], seconds


# Saving


def pieces_of(flats: list[Flat], *, rank: int, empty: Callable[[int], Tensor]) -> list[StatePiece]:
    """What a rank holds: its slices of the parameters and of two states of each, as contents.snapshot cuts them."""
    pieces = []
    for flat in flats:
        first = rank * flat.layout.slice_elements
        for index, start, stop in flat.layout.owned(rank):
            name, elements = flat.names[index], empty(stop - start)
            for prefix in (MODEL, *(f"{OPTIMIZER}{state}." for state in STATES)):
                pieces.append(
                    StatePiece(
                        name=prefix + name,
                        shape=flat.layout.shapes[index],
                        start=first + start - flat.layout.offsets[index],
                        elements=elements,
                    )
                )
    return pieces


@cache
def _on_meta(size: int) -> Tensor:
    return torch.empty(size, device="meta")


def headers_of(pieces: list[StatePiece]) -> int:
    """Describe a rank's file as write_part does; return how many boxes it has."""
    return sum(len(Boxes(piece.elements, shape=piece.shape, start=piece.start).boxes) for piece in pieces)


def part_of(flats: list[Flat], *, rank: int, contents: Contents) -> CheckpointPart:
    """What a rank tells of its file."""
    pieces = pieces_of(flats, rank=rank, empty=_on_meta)
    held = {piece.name.removeprefix(MODEL) for piece in pieces if piece.name.startswith(MODEL)}
    optimizer = contents.optimizer or {}
    states = {name: state for name, state in optimizer["state"].items() if name in held}
    own = [{"rank": rank}]
    return CheckpointPart(
        contents=replace(contents, num_ranks=1, optimizer={**optimizer, "state": states}, own=own),
        files={file_of(rank): StoredFile(num_bytes=sum(4 * piece.elements.numel() for piece in pieces), crc32=rank)},
        tensors=describe_pieces(pieces, rank=rank),
    )


def contents_of(flats: list[Flat]) -> Contents:
    parameters = {
        name: [list(shape), "float32"]
        for flat in flats
        for name, shape in zip(flat.names, flat.layout.shapes, strict=True)
    }
    described = {"step": 1.0, **{state: {"__like_parameter__": "float32"} for state in STATES}}
    groups = [{"params": list(parameters), "options": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}]
    optimizer = {"kind": "AdamW", "groups": groups, "state": dict.fromkeys(parameters, described)}
    return Contents(step=1, parameters=parameters, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save: seconds of the slowest rank's own part, of rank 0 after it, and the manifest."""

    part_seconds: float
    first_seconds: float
    num_bytes: int
    manifest: Manifest


@contextmanager
def mailbox() -> Iterator[None]:
    """Hand messages over in memory."""
    waiting: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def send(value: Any, *, to: int, group: Group) -> None:
        waiting[group.ranks[group.index], to].append(pickle.dumps(value))

    def receive(sender: int, *, group: Group) -> Any:
        return pickle.loads(waiting[sender, group.ranks[group.index]].popleft())

    with patch.object(small_collectives, "_send", send), patch.object(small_collectives, "_receive", receive):
        yield


def block_of(flats: list[Flat], *, first: int, stop: int, contents: Contents) -> CheckpointPart:
    """What ranks `first` to `stop` have merged: of each tensor a part of a slice, whole slices, and a part of one."""
    tensors: dict[str, StoredTensor] = {}
    for flat in flats:
        size = flat.layout.slice_elements
        for name, shape, (offset, count) in zip(flat.names, flat.layout.shapes, flat.layout.sizes(), strict=True):
            begin, end = max(offset, first * size), min(offset + count, stop * size)
            runs, rank = [], begin // size
            while begin < end:
                whole = (end - begin) // size if begin % size == 0 else 0
                length = size if whole else min(end, (rank + 1) * size) - begin
                runs.append(SliceRun(start=begin - offset, size=length, rank=rank, count=max(1, whole)))
                begin += length * max(1, whole)
                rank += max(1, whole)
            for prefix in (MODEL, *(f"{OPTIMIZER}{state}." for state in STATES)) if runs else ():
                tensors[prefix + name] = StoredTensor(dtype=torch.float32, shape=shape, runs=merged_runs(runs))
    ranks = range(first, stop)
    return CheckpointPart(
        contents=replace(contents, num_ranks=len(ranks), own=[{"rank": rank} for rank in ranks]),
        files={file_of(rank): StoredFile(num_bytes=0, crc32=rank) for rank in ranks},
        tensors=tensors,
    )


def saving(flats: list[Flat], *, num_ranks: int, folder: Path, listed: bool) -> Saved:
    """Play a save, the last rank first: each sends to one before it."""
    contents = contents_of(flats)
    everyone = tuple(range(num_ranks))
    played = everyone if num_ranks <= MOST_PLAYED else (0, *(1 << bit for bit in range(num_ranks.bit_length() - 1)))
    slowest = first_seconds = 0.0
    for rank in everyone[:: max(1, num_ranks // 64)]:
        begun = time.process_time()
        part = part_of(flats, rank=rank, contents=contents)
        assert headers_of(pieces_of(flats, rank=rank, empty=_on_meta)) >= len(part.tensors)
        slowest = max(slowest, time.process_time() - begun)
    whole: CheckpointPart | None = None
    with mailbox():
        for rank in reversed(played):
            group = Group(handle=None, ranks=everyone, index=rank)  # type: ignore[arg-type]
            if rank and num_ranks > MOST_PLAYED:
                small_collectives._send(
                    block_of(flats, first=rank, stop=min(2 * rank, num_ranks), contents=contents), to=0, group=group
                )
                continue
            part = part_of(flats, rank=rank, contents=contents)
            begun = time.process_time()
            whole = small_collectives.merge_on_first(part, CheckpointPart.merged, group=group)
            first_seconds = time.process_time() - begun
    assert whole is not None
    assert whole.tensors == block_of(flats, first=0, stop=num_ranks, contents=contents).tensors
    begun = time.process_time()
    with patch("shardwise.state.checkpoint.parts.MOST_LISTED_SLICES", 2**62) if listed else patch.dict({}):
        content = whole.manifest().to_bytes()
    (folder / FILE_NAME).write_bytes(content)
    manifest = read_manifest(folder)
    first_seconds += time.process_time() - begun
    return Saved(part_seconds=slowest, first_seconds=first_seconds, num_bytes=len(content), manifest=manifest)


# Loading


def loading(flats: list[Flat], *, manifest: Manifest, rank: int) -> float:
    """Plan what a rank of a job that is cut like `flats` reads; return the seconds."""
    # On a CPU, since the planner makes memory for tensors on meta; all elements are one.
    pieces = pieces_of(flats, rank=rank, empty=torch.empty(1).expand)
    begun = time.process_time()
    targets = {piece.name: Boxes(piece.elements, shape=piece.shape, start=piece.start) for piece in pieces}
    wanted = {name: (boxes.start, boxes.start + boxes.elements.numel()) for name, boxes in targets.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, manifest.metadata(wanted), is_coordinator=True)
    plan = planner.create_local_plan()
    seconds = time.process_time() - begun
    read = sum(math.prod(item.lengths) for item in plan.items)
    assert read == sum(piece.elements.numel() for piece in pieces), "the plan does not read every element once"
    return seconds


def measure(name: str, *, num_ranks: int, listed: bool) -> dict[str, float | int]:
    base = _most_bytes()
    flats, prepare_seconds = prepared(name, num_ranks=num_ranks)
    with TemporaryDirectory(prefix="scale-") as folder:
        saved = saving(flats, num_ranks=num_ranks, folder=Path(folder), listed=listed)
    others = max(1, num_ranks * 3 // 4)
    other_flats, _ = prepared(name, num_ranks=others)
    played = sorted({0, others // 3, others // 2, others - 1})
    return {
        "ranks": num_ranks,
        "joining_requests": joining(num_ranks),
        "agreeing_messages": max(agreeing(num_ranks, rank=rank) for rank in (0, num_ranks // 2, num_ranks - 1)),
        "flags_seconds": flags(num_ranks),
        "prepare_seconds": prepare_seconds,
        "saving_seconds": saved.part_seconds,
        "manifest_seconds": saved.first_seconds,
        "manifest_bytes": saved.num_bytes,
        "loading_seconds": max(loading(other_flats, manifest=saved.manifest, rank=rank) for rank in played),
        "memory_bytes": _most_bytes() - base,
    }


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-405b")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--listed", action="store_true", help="list every box in the manifest")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    if len(args.ranks) == 1:
        print(json.dumps(measure(args.model, num_ranks=args.ranks[0], listed=args.listed)))
        return
    rows = []
    for num_ranks in args.ranks:
        # Each in its own process, whose memory is its own.
        words = ["--model", args.model, "--ranks", str(num_ranks), *(["--listed"] if args.listed else [])]
        played = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True)
        rows.append(json.loads(played.stdout))
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(
            json.dumps({"model": args.model, "torch": torch.__version__, "rows": rows}, indent=2) + "\n"
        )
    worst = max(max(row["saving_seconds"] + row["manifest_seconds"], row["loading_seconds"]) for row in rows)
    sys.exit(0 if worst < 10 and all(row["memory_bytes"] < 2**30 for row in rows) else 1)


if __name__ == "__main__":
    main()
