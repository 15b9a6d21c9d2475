"""The computation of a step, piece by piece: the streams of the trace, and the time of each at a batch."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from shardwise.hardware import Device
from shardwise.hardware.issue_times import ISSUED_BY_ITSELF
from shardwise.planner.job import Job
from shardwise.planner.time.compute import num_recomputed, stream_seconds
from shardwise.planner.time.fp8_products import NO_FP8, Fp8Weights, fp8_weights
from shardwise.planner.time.queues import WorkSeconds
from shardwise.planner.ways import is_compiled
from shardwise.spec import ModelSpec
from shardwise.spec.law import Line
from shardwise.spec.step import BEFORE_FORWARD, FORWARD, Stream

PieceKey = tuple[int, bool, int, int, bool, float, Fp8Weights]


@dataclass(frozen=True, slots=True, eq=False)
class ComputePiece:
    """A stream with operations.

    recomputed     number of operations at its start that repeat the forward
    num_units      number of units that it stands for
    is_fused       a compiler makes one kernel of several operations
    nodes_per_op   nodes of the autograd graph per operation, in backward
    fp8            weights that it multiplies in fp8
    """

    stream: Stream
    is_backward: bool
    recomputed: int
    num_units: int
    is_fused: bool
    nodes_per_op: float = 1.0
    fp8: Fp8Weights = NO_FP8

    @property
    def key(self) -> PieceKey:
        return (
            id(self.stream), self.is_backward, self.recomputed, self.num_units, self.is_fused, self.nodes_per_op,
            self.fp8,
        )  # fmt: skip

    @property
    def num_others(self) -> int:
        """Operations of all its units without a measured issue time; in backward only those that autograd issues."""
        ops = self.stream.ops[self.recomputed :]
        return self.num_units * sum(op.name not in ISSUED_BY_ITSELF for op in ops)


def pieces_of(job: Job) -> list[ComputePiece]:
    """Return the pieces in the order of `job.streams`."""
    forwards = {unit: stream for (trigger, unit, _), stream in job.streams if trigger == BEFORE_FORWARD}
    recomputed_in: dict[tuple[int, int], int] = {}
    found = []
    for (trigger, unit, _), stream in job.streams:
        if stream.ops:
            is_backward, recomputed = trigger not in FORWARD, 0
            if is_backward and unit in forwards and job.plan.recompute_of(unit) != "none":
                # Equal units have the same streams.
                both = id(forwards[unit]), id(stream)
                if both not in recomputed_in:
                    recomputed_in[both] = num_recomputed(forwards[unit], stream)
                recomputed = recomputed_in[both]
            is_fused = is_compiled(job.plan, unit=unit)
            fp8 = fp8_weights(job.spec.unit(unit), plan=job.plan)
            found.append(ComputePiece(stream, is_backward, recomputed, job.weight(unit), is_fused, fp8=fp8))
    forward, backward = (sum(piece.num_others for piece in found if piece.is_backward is way) for way in (False, True))
    # Each operation of forward is a node of the autograd graph.
    nodes_per_op = min(forward / max(backward, 1), 1.0)
    return [replace(piece, nodes_per_op=nodes_per_op) for piece in found]


@dataclass(slots=True, eq=False)
class Pieces:
    """The pieces of jobs with equal computation, and their seconds by batch."""

    pieces: list[ComputePiece]
    seq: int | None
    precision: str
    device: Device
    # Seconds of single streams, shared by all jobs of the model.
    seen: dict[PieceKey, WorkSeconds]
    # The share of the model's parameters that are trained.
    trained: float
    _works: dict[int, list[WorkSeconds]] = field(default_factory=dict)
    _flops: Line | None = None

    def works(self, batch: int) -> list[WorkSeconds]:
        found = self._works.get(batch)
        if found is None:
            found = self._works[batch] = [self._work(piece, batch) for piece in self.pieces]
        return found

    def _work(self, piece: ComputePiece, batch: int) -> WorkSeconds:
        key = (
            id(piece.stream), piece.is_backward, piece.recomputed, batch, piece.is_fused, piece.nodes_per_op, piece.fp8
        )  # fmt: skip
        if key not in self.seen:
            self.seen[key] = stream_seconds(
                piece.stream,
                batch=batch,
                seq=self.seq,
                precision=self.precision,
                device=self.device,
                backward=piece.is_backward,
                recomputed=piece.recomputed,
                fuses=piece.is_fused,
                nodes_per_op=piece.nodes_per_op,
                fp8=piece.fp8,
            )
        return self.seen[key]

    @property
    def forward_flops(self) -> Line:
        """Operations of forward, as a line in the batch."""
        if self._flops is None:
            lines = [
                (piece.num_units, op.num_flops.line(self.seq))
                for piece in self.pieces
                if not piece.is_backward
                for op in piece.stream.ops
            ]
            const, per_sample = (sum(n * getattr(line, name) for n, line in lines) for name in ("const", "per_sample"))
            self._flops = Line(const, per_sample)
        return self._flops


@lru_cache(maxsize=64)
def _known(
    spec: ModelSpec, precision: str, device: Device
) -> tuple[dict[tuple[PieceKey, ...], Pieces], dict[PieceKey, WorkSeconds]]:
    """Return the caches of pieces and of the seconds of single streams."""
    return {}, {}


def timed_pieces(job: Job, *, device: Device) -> Pieces:
    """Return the pieces of a job, shared by jobs of equal streams (to which they refer, so that ids stay unique)."""
    pieces = pieces_of(job)
    known, seen = _known(job.spec, job.precision, device)
    key = tuple(piece.key for piece in pieces)
    if key not in known:
        params = [tensor for unit in job.spec.units for tensor in unit.params]
        trained = sum(one.num_elements for one in params if one.trainable) / sum(one.num_elements for one in params)
        known[key] = Pieces(pieces, job.spec.seq, job.precision, device, seen, trained)
    return known[key]
