"""Fills a model and its optimizer from a generation in memory, whatever the number of ranks and the plan are now.

A rank's slices are ranges of flattened tensors, and so are the pieces that were stored. Each rank plans by itself which
parts of which pieces it reads, those of its own node first. The others are sent by ranks of the nodes that hold them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.prepared.average import EMA
from shardwise.state.checkpoint.boxes import Boxes
from shardwise.state.checkpoint.checkpoints import Loaded
from shardwise.state.checkpoint.contents import loading
from shardwise.state.checkpoint.manifest import OWN, Manifest, StoredTensor
from shardwise.state.checkpoint.parts import merged_contents
from shardwise.state.checkpoint.ranks import Ranks
from shardwise.state.checkpoint.typed import from_json
from shardwise.state.recovery.finding import Generation, HeldRecord, Nodes
from shardwise.state.recovery.generation import StoredPiece, elements_of, mapped
from shardwise.state.recovery.memory_folder import MemoryFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRead:
    """Elements `start` to `stop` of a tensor, read from a piece of a record, both by their index in a generation."""

    name: str
    start: int
    stop: int
    record: int
    piece: int


def restore(
    generation: Generation,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    folder: MemoryFolder,
    ranks: Ranks,
    nodes: Nodes,
    ema: EMA | None = None,
) -> Loaded:
    """Fill the model, the optimizer and the average. Collective; raises CheckpointError if they do not fit."""
    manifest = _manifest(generation)
    load = ranks.together(lambda: loading(model, optimizer, manifest=manifest, ranks=ranks, ema=ema))
    targets = {name: _flat(target) for name, target in load.targets.items()}
    node = nodes.of_ranks[ranks.index]
    reads = planned(load.wanted, generation.held, node=node)
    memories = _Memories(generation, folder=folder)
    with torch.no_grad():
        for read in reads:
            if generation.held[read.record].node == node:
                start, elements = targets[read.name]
                elements[read.start - start : read.stop - start].copy_(memories.elements(read))
        for read, received in _sent(reads, generation=generation, memories=memories, ranks=ranks, nodes=nodes):
            start, elements = targets[read.name]
            elements[read.start - start : read.stop - start].copy_(received)
        for name, target in load.targets.items():
            if not isinstance(target, Boxes) and not target.is_contiguous():
                target.copy_(targets[name][1].view(target.shape))
    load.finish()
    return Loaded(step=generation.step, progress=from_json(manifest.contents.progress), own=load.own)


def _manifest(generation: Generation) -> Manifest:
    """Return what a checkpoint's manifest would say, less the places of tensors."""
    records = generation.first_records()
    own = {
        piece.name: StoredTensor(dtype=piece.dtype, shape=piece.shape)
        for record in records
        for piece in record.pieces
        if piece.name.startswith(OWN)
    }
    return Manifest(contents=merged_contents([record.contents for record in records]), files={}, tensors=own)


def _flat(target: Any) -> tuple[int, Tensor]:
    """Return where a target begins in its tensor, and its elements in one dimension."""
    if isinstance(target, Boxes):
        return target.start, target.elements
    return 0, target.detach().reshape(-1)


def planned(wanted: dict[str, tuple[int, int]], held: Sequence[HeldRecord], *, node: str) -> list[PieceRead]:
    """Return the reads that cover the wanted elements of each tensor: from the node's own memory where it has them."""
    by_name: dict[str, list[tuple[StoredPiece, int, int]]] = defaultdict(list)
    for number, one in enumerate(held):
        for index, piece in enumerate(one.record.pieces):
            if piece.begin is not None and piece.name in wanted:
                by_name[piece.name].append((piece, number, index))
    reads = []
    for name, (start, stop) in wanted.items():
        candidates = sorted(by_name[name], key=lambda one: (one[0].start, held[one[1]].node != node))
        while start < stop:
            fitting = [one for one in candidates if one[0].start <= start < one[0].start + one[0].count]
            # The generation is whole, so there is one.
            piece, number, index = min(
                fitting, key=lambda one: (held[one[1]].node != node, -(one[0].start + one[0].count))
            )
            end = min(stop, piece.start + piece.count)
            if held[number].node != node:
                # Up to where this node has the elements itself.
                near = (one[0].start for one in candidates if held[one[1]].node == node and start < one[0].start < end)
                end = min(near, default=end)
            reads.append(PieceRead(name=name, start=start, stop=end, record=number, piece=index))
            start = end
    return reads


class _Memories:
    """The data files of this node, mapped when they are first read."""

    def __init__(self, generation: Generation, *, folder: MemoryFolder) -> None:
        self._generation, self._folder = generation, folder
        self._mapped: dict[int, Tensor] = {}

    def elements(self, read: PieceRead) -> Tensor:
        record = self._generation.held[read.record].record
        if read.record not in self._mapped:
            self._mapped[read.record] = mapped(self._folder.path, record)
        piece = record.pieces[read.piece]
        return elements_of(piece, memory=self._mapped[read.record])[read.start - piece.start : read.stop - piece.start]


def _sent(
    reads: Sequence[PieceRead], *, generation: Generation, memories: _Memories, ranks: Ranks, nodes: Nodes
) -> list[tuple[PieceRead, Tensor]]:
    """Send what other nodes need, and return what this rank gets. All ranks follow one order, so that none hangs."""
    node = nodes.of_ranks[ranks.index]
    everyone = ranks.each(lambda: [read for read in reads if generation.held[read.record].node != node])
    received = []
    for reader, theirs in enumerate(everyone):
        for read in theirs:
            senders = nodes.ranks(generation.held[read.record].node)
            sender = senders[reader % len(senders)]
            if ranks.index == sender:
                dist.send(memories.elements(read).contiguous().view(torch.uint8), dst=reader, group=ranks.handle)
            elif ranks.index == reader:
                piece = generation.held[read.record].record.pieces[read.piece]
                buffer = torch.empty(read.stop - read.start, dtype=piece.dtype)
                dist.recv(buffer.view(torch.uint8), src=sender, group=ranks.handle)
                received.append((read, buffer))
    return received
