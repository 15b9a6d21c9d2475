"""One plan of one model on a cluster → the instructions of a step for the queues, for every batch at once."""

from dataclasses import dataclass
from itertools import groupby, pairwise

from shardwise.hardware import Cluster
from shardwise.hardware.borrowed import host_factor
from shardwise.planner.job import Job
from shardwise.planner.overhead import Overhead
from shardwise.planner.sizes import sizes_of
from shardwise.planner.time.collective import rings_of
from shardwise.planner.time.queues import COMPUTE, LOAD, MARK, SEND, STREAM, Instruction, WorkSeconds
from shardwise.planner.time.time_executor import TimeExecutor
from shardwise.planner.trace_order import Key, TracedStep, keys_in_order
from shardwise.program import StepProgram, Trigger
from shardwise.spec.step import FORWARD, Stream


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
