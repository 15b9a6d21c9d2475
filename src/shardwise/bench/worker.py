"""A rank of one run of a bench: `python -m shardwise.bench.worker FOLDER`, started on every rank.

steps 1 … 3       are compared: losses, norms of gradients; the third is observed (first_steps.py)
up to `warm_up`   nothing is looked at
blocks            are timed, each from when all ranks have come until the last of them is done
a few more        are taped, one at a time: the one that took the most usual time says when each operation was issued
set up again      and in the third step memory and operations are recorded: of what the profiler has not seen from
                  the beginning on it knows nothing, and under it nothing should be timed
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

from shardwise.bench.case_result import UnitOutline
from shardwise.bench.contestants import ENGINES
from shardwise.bench.first_steps import NUM_STEPS, take_first_steps
from shardwise.bench.modes import mode_of
from shardwise.bench.run_files import ASKED, BenchRun, Found
from shardwise.bench.subject import BenchTraining, start
from shardwise.bench.taped_steps import NUM_TAPED, recorded_step, with_rows, with_usual_tape
from shardwise.comm.agreement import meet
from shardwise.comm.join import Place, joined
from shardwise.engine.protocol import find_engine
from shardwise.launch.failure import LOG, report, write_to_log
from shardwise.profile.recording import WARM_UP_STEPS, StepRecording, allocations_on
from shardwise.spec import ModelSpec
from shardwise.train.batches import to_device
from shardwise.train.loop import Training, Update
from shardwise.train.metrics import Window
from shardwise.train.randomness import deterministic_kernels
from shardwise.train.run_folder import environment


def run_rank(run: BenchRun) -> Found:
    """This rank's part of a run."""
    run = _long_enough(run)
    config = run.config
    device = None if config.run.device == "auto" else torch.device(config.run.device)
    with (
        deterministic_kernels(config.train.deterministic),
        joined(device, limit_seconds=config.run.limit_seconds, silent=run.silent, on_error=report) as place,
    ):
        found = _measured(run, place=place)
        if _is_recorded(run):
            # The first model is gone, but for the circles in it.
            gc.collect()
            found = _recorded(run, found, place=place)
    return found


def _long_enough(run: BenchRun) -> BenchRun:
    """With as many steps as a run takes, at least, so that neither samples nor the learning rate run out."""
    loop = run.config.train
    num_steps = max(loop.steps or 0, _warm_up(run) + run.blocks * run.block_steps + NUM_TAPED)
    return replace(run, config=replace(run.config, train=replace(loop, steps=num_steps, epochs=None)))


def _warm_up(run: BenchRun) -> int:
    """After three ordinary steps ours makes its graph; its first and tenth replay are compared. By hand it is made in
    the twelfth step. Steps in which something is compiled come before those.
    """
    compiles = 2 if run.config.plan.compiler != "none" else 0
    return max(run.warm_up, NUM_STEPS + compiles + 10 * _captures(run))


def _captures(run: BenchRun) -> bool:
    return mode_of(run.engine) != "eager"


def _is_recorded(run: BenchRun) -> bool:
    """What a graph replays goes through no hook: of captured steps there is neither ledger nor tape."""
    return run.detailed and not run.silent and not _captures(run)


def _measured(run: BenchRun, *, place: Place) -> Found:
    """Steps that are compared, and steps that are timed."""
    subject = start(run, place=place)
    training, device, on_gpu = subject.training, place.device, place.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    first = take_first_steps(subject, run=run)
    window = Window(device=device, num_ranks=place.num_ranks)
    for _ in range(_warm_up(run) - NUM_STEPS):
        window.add(subject.step())
    subject.settle()
    losses = [step.loss for step in window.read()]
    if on_gpu and not _captures(run):
        # A graph takes its memory when it is captured: what its replays use counts then, and never again.
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(run.blocks):
        seconds.append(_block(subject, run=run, window=window))
        losses += [step.loss for step in window.read()]
    found = Found(
        rank=place.rank,
        num_ranks=place.num_ranks,
        environment=_environment(run, place=place),
        # What a silent rank has is its own part of the loss.
        losses=() if run.silent else (*first.losses, *losses),
        block_seconds=_slowest(seconds, run=run, place=place),
        first_step_seconds=first.first_step_seconds,
        step_samples=training.sharing.step_samples,
        step_tokens=first.step_tokens,
        grad_norms=first.grad_norms,
        param_norms=first.param_norms,
        dtypes=first.dtypes,
        allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        sent_bytes=first.sent_bytes,
        calls=first.calls,
        units=_units(subject.spec),
        buckets=_buckets(training),
    )
    return with_usual_tape(found, subject) if _is_recorded(run) else found


def _block(subject: BenchTraining, *, run: BenchRun, window: Window) -> float:
    """Seconds per step, on this rank, of steps that all ranks begin together. Losses are left where they lie."""
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
    """Of each block, what the rank that was last took: the same numbers on every rank."""
    if not seconds:
        return ()
    if not run.silent:
        slowest = torch.tensor(seconds, dtype=torch.float64, device=place.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return tuple(slowest.tolist())
    # The group says nothing, but its store does.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"seconds/{place.rank}", json.dumps(seconds))
    everyone = [json.loads(store.get(f"seconds/{rank}")) for rank in range(place.num_ranks)]
    return tuple(max(block) for block in zip(*everyone, strict=True))


def _recorded(run: BenchRun, found: Found, *, place: Place) -> Found:
    """And what a step held, row by row; the rows of the tape's operations are those of the same operations here."""
    with allocations_on(place.device) as live:
        subject = start(run, place=place, to_be_recorded=True)
        training = subject.training
        recording = StepRecording(
            live,
            model=training.model,
            optimizer=training.optimizer,
            spec=subject.spec,
            modules=subject.modules,
            device=place.device,
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
    """`update`, whose batches are on the device before it begins, where the recording sees them."""

    def shown(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
        recording.batch = to_device(batches, training.device)
        return update(training, weights, recording.batch)

    return shown


def _units(spec: ModelSpec) -> tuple[UnitOutline, ...]:
    return tuple(
        UnitOutline(
            name=unit.name,
            num_params=unit.num_params,
            num_trained=sum(param.num_elements for param in unit.params if param.trainable),
        )
        for unit in spec.units
    )


def _buckets(training: Training) -> dict[str, tuple[str, ...]]:
    """Return the units of each bucket, as our engine reduces them."""
    engine = find_engine(training.model)
    return {} if engine is None else engine.buckets(training.model)


def _environment(run: BenchRun, *, place: Place) -> dict[str, Any]:
    """What numbers depend on, with the version of the engine, if it comes in a package of its own."""
    found = environment(device=place.device, num_ranks=place.num_ranks, command=())
    package = ENGINES[run.engine].package
    return {name: value for name, value in found.items() if name != "command"} | (
        {package: metadata.version(package)} if package else {}
    )


def main(folder: str) -> None:
    """Read what is asked for, do it, and leave what was found."""
    if LOG in os.environ:
        # A bench has a terminal of its own to speak on; torch's profiler and other people's engines like to talk.
        write_to_log(1, 2)
    run = BenchRun.from_data(json.loads(Path(folder, ASKED).read_text(encoding="utf-8")))
    run_rank(run).save(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
