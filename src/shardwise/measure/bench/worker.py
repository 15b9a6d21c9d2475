"""One rank of a run of a bench: `python -m shardwise.measure.bench.worker FOLDER`, started on every rank.

steps 1 … 3       are compared: losses, norms of gradients; the third is observed (first_steps.py)
up to `warm_up`   are not measured
blocks            are timed, each from when all ranks have arrived until the last of them is done
a few more        are taped: the most typical one says when each operation was issued (taped_steps.py)
after a new setup memory and operations of the third step are recorded: the profiler has to see a model from the start,
                  and nothing should be timed under it
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.files.data_file import read_json
from shardwise.base.torch_internals import torch_private
from shardwise.comm.groups.agreement import meet
from shardwise.comm.job.join import Place, joined
from shardwise.engines import find_engine
from shardwise.measure.bench.case_result import UnitOutline
from shardwise.measure.bench.contestants import ENGINES
from shardwise.measure.bench.first_steps import NUM_STEPS, take_first_steps
from shardwise.measure.bench.modes import mode_of
from shardwise.measure.bench.run_files import ASKED, BenchRun, Found
from shardwise.measure.bench.subject import BenchTraining, start
from shardwise.measure.bench.taped_steps import NUM_TAPED, recorded_step, with_rows, with_usual_tape
from shardwise.measure.profile.recording import WARM_UP_STEPS, StepRecording, allocations_on
from shardwise.training.launch.failure import LOG, report, write_to_log
from shardwise.training.loop.batches import to_device
from shardwise.training.loop.metrics import Window
from shardwise.training.loop.randomness import deterministic_kernels
from shardwise.training.loop.training_state import Training, Update
from shardwise.training.run_folder import environment


def run_rank(run: BenchRun) -> Found:
    """Do this rank's part of a run."""
    run = _long_enough(run)
    config = run.config
    device = None if config.run.device == "auto" else torch.device(config.run.device)
    with (
        deterministic_kernels(config.train.deterministic),
        joined(device, limit_seconds=config.run.limit_seconds, silent=run.silent, on_error=report) as place,
    ):
        found = _measured(run, place=place)
        if _is_recorded(run):
            # Frees the reference cycles of the first model.
            gc.collect()
            found = _recorded(run, found, place=place)
    return found


def _long_enough(run: BenchRun) -> BenchRun:
    """Extend the training to the steps that the run takes, so that neither samples nor the learning rate run out."""
    loop = run.config.train
    num_steps = max(loop.steps or 0, _warm_up(run) + run.blocks * run.block_steps + NUM_TAPED)
    return replace(run, config=replace(run.config, train=replace(loop, steps=num_steps, epochs=None)))


def _warm_up(run: BenchRun) -> int:
    """Return how many steps to take before timing. Our engine records units in its first steps; a capture by hand is
    made in the twelfth step. Steps that compile come first.
    """
    compiles = 2 if run.config.plan.compiler != "none" else 0
    return max(run.warm_up, NUM_STEPS + compiles + 10 * _captures(run))


def _captures(run: BenchRun) -> bool:
    return mode_of(run.engine) != "eager"


def _is_recorded(run: BenchRun) -> bool:
    """Return whether a step is recorded: graphs hide their operations from a ledger and a tape."""
    return run.detailed and not run.silent and not _captures(run)


def _measured(run: BenchRun, *, place: Place) -> Found:
    """Take the steps that are compared and those that are timed."""
    subject = start(run, place=place)
    training, device, on_gpu = subject.training, place.device, place.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    found = Found(
        rank=place.rank,
        environment=_environment(run, place=place),
        step_samples=training.sharing.step_samples,
        units=tuple(map(UnitOutline.of, subject.spec.units)),
    )
    found = take_first_steps(found, subject, run=run)
    window = Window(device=device, num_ranks=place.num_ranks)
    for _ in range(_warm_up(run) - NUM_STEPS):
        window.add(subject.step())
    subject.settle()
    losses = [step.loss for step in window.read()]
    if on_gpu and not _captures(run):
        # A graph takes the memory of its replays only once, when it is captured.
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(run.blocks):
        seconds.append(_block(subject, run=run, window=window))
        losses += [step.loss for step in window.read()]
    engine = find_engine(training.model)
    found = replace(
        found,
        # A silent rank has only its own part of the loss.
        losses=() if run.silent else (*found.losses, *losses),
        block_seconds=_slowest(seconds, run=run, place=place),
        allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        buckets={} if engine is None else engine.buckets(),
    )
    return with_usual_tape(found, subject) if _is_recorded(run) else found


def _block(subject: BenchTraining, *, run: BenchRun, window: Window) -> float:
    """Return this rank's seconds per step in a block that all ranks begin together. Losses stay on the device."""
    subject.settle()
    if run.silent:
        meet("a block of steps", limit_seconds=run.config.run.limit_seconds)
    else:
        dist.all_reduce(torch.zeros((), device=subject.training.device))
        subject.settle()
    began = time.perf_counter()
    for _ in range(run.block_steps):
        window.add(subject.step())
    subject.settle()
    return (time.perf_counter() - began) / run.block_steps


def _slowest(seconds: Sequence[float], *, run: BenchRun, place: Place) -> tuple[float, ...]:
    """Return the time of the slowest rank for each block, on every rank."""
    if not seconds:
        return ()
    if not run.silent:
        slowest = torch.tensor(seconds, dtype=torch.float64, device=place.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return tuple(slowest.tolist())
    # The group does not communicate, but its store does.
    store = torch_private.default_store()
    store.set(f"seconds/{place.rank}", json.dumps(seconds))
    everyone = [json.loads(store.get(f"seconds/{rank}")) for rank in range(place.num_ranks)]
    return tuple(max(block) for block in zip(*everyone, strict=True))


def _recorded(run: BenchRun, found: Found, *, place: Place) -> Found:
    """Record a step: add its memory row by row, and the rows of the tape's operations."""
    with allocations_on(place.device) as live:
        subject = start(run, place=place, to_be_recorded=True)
        training = subject.training
        model, optimizer, spec = training.model, training.optimizer, subject.spec
        recording = StepRecording(
            live, model=model, optimizer=optimizer, spec=spec, modules=subject.modules, device=place.device
        )
        training.update = _showing_batches(training.update, recording)
        with recording.attached():
            for _ in range(WARM_UP_STEPS):
                subject.step()
            entries = recorded_step(subject, recording)
        subject.settle()
    ledger = recording.ledger()
    peak = ledger.peak.total_bytes if found.allocated_bytes is None else found.allocated_bytes
    return replace(with_rows(found, entries, recording), ledger=ledger, allocated_bytes=peak)


def _showing_batches(update: Update, recording: StepRecording) -> Update:
    """Return `update`, with its batches put on the device before it begins, where the recording sees them."""

    def shown(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
        recording.batch = to_device(batches, training.device)
        return update(training, weights, recording.batch)

    return shown


def _environment(run: BenchRun, *, place: Place) -> dict[str, Any]:
    """Return what results depend on, with the version of the engine's package, if it has one."""
    found = environment(device=place.device, num_ranks=place.num_ranks, command=())
    package = ENGINES[run.engine].package
    return {name: value for name, value in found.items() if name != "command"} | (
        {package: metadata.version(package)} if package else {}
    )


def main(folder: str) -> None:
    if LOG in os.environ:
        # The terminal is for the bench; torch's profiler and other engines print messages.
        write_to_log(1, 2)
    run = BenchRun.from_data(read_json(Path(folder, ASKED)))
    run_rank(run).save(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
