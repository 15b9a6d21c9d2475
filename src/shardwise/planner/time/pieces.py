"""The computation of a step, piece by piece: the streams of the trace, and the time of each at a batch.

One plan of one model on a cluster → the instructions of a step for the queues, for every batch at once.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise

from shardwise.hardware import Cluster, Device
from shardwise.hardware.borrowed import host_factor
from shardwise.hardware.calibration import ISSUED_BY_ITSELF
from shardwise.planner.engine_model import Overhead
from shardwise.planner.fold import Key, TracedStep, keys_in_order
from shardwise.planner.job import Job
from shardwise.planner.time.collective import rings_of
from shardwise.planner.time.compute import NO_FP8, Fp8Weights, fp8_weights, num_recomputed, stream_seconds
from shardwise.planner.time.queues import COMPUTE, LOAD, MARK, SEND, STREAM, Instruction, WorkSeconds
from shardwise.planner.time.time_executor import TimeExecutor
from shardwise.planner.ways import is_compiled
from shardwise.planner.whole_matrices import sizes_of
from shardwise.program import StepProgram, Trigger
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import BEFORE_FORWARD, FORWARD, Line, Stream

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A step: `first`, a pass before the last one, which may keep its gradients; `last`, the last pass with the update.

    Work is numbered: first the model's pieces (pieces.py), then `works`, which do not depend on the batch. `update`:
    the end of `last`, if it leaves something on the wire that the next step waits for.
    """

    first: tuple[Instruction, ...]
    last: tuple[Instruction, ...]
    works: tuple[WorkSeconds, ...]
    update: tuple[Instruction, ...]


def schedule_of(job: Job, *, cluster: Cluster, clips: bool = False, overlap: str = "all") -> Schedule:
    """Return the schedule of a job, whose model may be shortened; `clips`: clip the gradients by their norm.

    `overlap`: the communication that runs during computation (systems.py).
    """
    executor = TimeExecutor(
        job=job,
        cluster=cluster,
        rings=rings_of(job.mesh, cluster=cluster),
        optimizer=job.optimizer_name,
        clips=clips,
        overlap=overlap,
        sizes=sizes_of(job.spec, plan=job.plan),
        overhead=overhead_of(job, cluster=cluster),
        num_pieces=sum(bool(stream.ops) for _, stream in job.streams),
        buckets={bucket.name: bucket for bucket in job.program.buckets},
    )
    return schedule_by(executor)


def schedule_by(executor: TimeExecutor) -> Schedule:
    job = executor.job
    last, update = _pass(job.program, executor)
    first = last
    if job.plan.accumulate > 1 and not job.plan.accumulate_reduced:
        first, _ = _pass(job.build_program(reduces=False), executor)
    return Schedule(
        first=tuple(first),
        last=(*last, *update),
        works=tuple(executor.works),
        update=tuple(update) if any(one.what in (SEND, STREAM, LOAD) for one in update) else (),
    )


def overhead_of(job: Job, *, cluster: Cluster) -> Overhead:
    """Return the overhead of the job's engine on the cluster's CPUs."""
    return job.engine.overhead.on(host_factor(cluster.device))


def _pass(program: StepProgram, executor: TimeExecutor) -> tuple[list[Instruction], list[Instruction]]:
    """Return the instructions of a pass and of the update."""
    job = executor.job
    found = executor.begin()
    step = TracedStep(program, executor, in_order=job.in_order)
    marks = {is_forward: _marks(job, is_forward=is_forward) for is_forward in (True, False)}
    piece = 0
    for (is_forward, unit), group in groupby(job.streams, key=_phase):
        for key, stream in group:
            step.reach(key)
            if stream.ops:
                found.append(Instruction(COMPUTE, f"{'forward' if is_forward else 'backward'} {unit}", piece))
                piece += 1
        if unit in marks[is_forward]:
            found.append(marks[is_forward][unit])
    # The rows that are not in the trace.
    update: list[Instruction] = []
    for key in keys_in_order((key for key, _ in job.streams), program=program)[len(job.streams) :]:
        if key[0] == Trigger.AFTER_STEP.value:
            executor.instructions = update
        step.reach(key)
    return found, update


def _marks(job: Job, *, is_forward: bool) -> dict[str, Instruction]:
    """Return marks for the ends of each unit that stands for others and of its predecessor in the phase."""
    found = {}
    for names in job.short.chosen.values():
        order = names if is_forward else names[::-1]
        for before, name in pairwise(order):
            if job.weight(name) > 1:
                found[before] = Instruction(MARK, before)
                found[name] = Instruction(MARK, name, 1, 0.0, float(job.weight(name)))
    return found


def _phase(item: tuple[Key, Stream]) -> tuple[bool, str]:
    """Return whether a row is of forward, and its unit."""
    (trigger, unit, _), _ = item
    return trigger in FORWARD, unit
