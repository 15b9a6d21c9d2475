"""One rank's run: join the job, claim the folder, set up, go on from the newest checkpoint, train. Then the loop."""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn

from shardwise.checkpoint import Checkpoints, Loaded
from shardwise.comm.start import agree
from shardwise.data.sampler import DistributedSampler
from shardwise.engine.scaler import GradScaler
from shardwise.engines import capture, prepare
from shardwise.errors import InvalidData, InvalidModel
from shardwise.spec import ROOT
from shardwise.tasks import Task, load_task
from shardwise.train import folder as run_folder
from shardwise.train.batches import Sharing, batches_of, check_size, samples_seen
from shardwise.train.config import TrainConfig
from shardwise.train.join import Place, joined
from shardwise.train.loop import Training, run_steps, update
from shardwise.train.metrics import JsonLines, Recorder, StepMetrics, TensorBoard, Writer
from shardwise.train.optimizer import make_optimizer
from shardwise.train.preemption import preemption
from shardwise.train.progress import progress_on
from shardwise.train.randomness import deterministic_kernels, restore_random_states, seed_everything
from shardwise.units import unit_modules

OnStep = Callable[[StepMetrics], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: after which step of how many, told to stop (`preempted`) or not; the last step that it took."""

    step: int
    num_steps: int
    preempted: bool
    last: StepMetrics | None
    folder: Path


def train(
    config: TrainConfig,
    *,
    on_step: OnStep | None = None,
    fresh: bool = False,
    command: Sequence[str] = (),
    console: Console | None = None,
) -> Outcome:
    """Train on this rank, together with the others of its job; alone, if nobody started it as a rank.

    Goes on from the newest good checkpoint in the run folder; `fresh` starts anew. `on_step` is called on every rank
    with each step's metrics, in order, when they are read: every train.log_every steps. `command` is noted down.
    """
    device = None if config.run.device == "auto" else torch.device(config.run.device)
    with (
        deterministic_kernels(config.train.deterministic),
        joined(device, limit_seconds=config.run.limit_seconds) as place,
        preemption(grace_seconds=config.checkpoint.grace_seconds) as request,
    ):
        console = console or Console()
        notes = _claim(config, place=place, fresh=fresh, command=command)
        training = _set_up(config, place=place)
        checkpoints = Checkpoints(
            config.folder / run_folder.CHECKPOINTS,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        _go_on(training, checkpoints, place=place)
        _tell_start(training, place=place, console=console, notes=notes)
        recorder = Recorder(_writers(training, place=place, console=console), on_step=on_step)
        with closing(recorder):
            preempted = run_steps(training, checkpoints=checkpoints, request=request, recorder=recorder)
        checkpoints.close()
        if preempted and place.rank == 0:
            console.print(f"told to stop: saved after step {training.step}; the same command goes on", highlight=False)
    return Outcome(
        step=training.step,
        num_steps=training.num_steps,
        preempted=preempted,
        last=recorder.last,
        folder=config.folder,
    )


def _claim(config: TrainConfig, *, place: Place, fresh: bool, command: Sequence[str]) -> list[str]:
    """Rank 0 claims the folder; what stands against it, or a rank with another config, is told on every rank."""
    notes: list[str] = []

    def describe() -> str:
        if place.rank == 0:
            environment = run_folder.environment(device=place.device, num_ranks=place.num_ranks, command=command)
            # Ranks that are started again after a failure go on, whatever was asked for at first.
            anew = fresh and place.restarts == 0
            notes.extend(run_folder.claim(config, fresh=anew, environment=environment))
        return "\n".join(f"{name} = {value}" for name, value in config.to_dict().items())

    agree(describe, what="configs")
    return notes


def _set_up(config: TrainConfig, *, place: Place) -> Training:
    """The model with its plan, the optimizer and the data, before the first step."""
    # The same weights whatever the number of ranks; they come from rank 0.
    seed_everything(config.train.seed, step=0, rank=0)
    task = _load_task(config)
    optimizer = make_optimizer(task.model, config.optimizer)
    if config.train.compile != "none":
        _compile_units(task.model, config=config)
    model, optimizer = prepare(task.model, optimizer, config.plan, device=place.device)
    num_samples = len(cast(Any, task.dataset))
    assert config.plan.micro_batch is not None
    return Training(
        config=config,
        task=task,
        model=model,
        optimizer=optimizer,
        scaler=GradScaler(place.device.type, enabled=config.plan.precision == "fp16"),
        sampler=DistributedSampler(
            num_samples,
            rank=place.rank,
            num_ranks=place.num_ranks,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
            endless=True,
        ),
        sharing=Sharing(
            rank=place.rank,
            num_ranks=place.num_ranks,
            micro_batch=config.plan.micro_batch,
            accumulate=config.plan.accumulate,
            num_samples=None if config.train.epochs is None else config.train.epochs * num_samples,
        ),
        batches=iter(()),
        device=place.device,
        step=0,
        num_steps=0,
        update=capture(update, model, optimizer),
    )


def _load_task(config: TrainConfig) -> Task:
    section = config.task
    # A model of the catalogue is made on the meta device: `prepare` fills it straight into slices.
    task = load_task(section.model, dataset=section.dataset, seq=section.seq, image=section.image, device="meta")
    if task.dataset is None:
        raise InvalidData(f"task.model = {section.model!r} brings no dataset: set task.dataset")
    if config.train.eval_every and (task.evaluate is None or task.eval_dataset is None):
        lacks = "evaluate" if task.evaluate is None else "eval_dataset"
        raise InvalidData(f"train.eval_every = {config.train.eval_every}, but the task has no {lacks}: leave it out")
    return task


def _compile_units(model: nn.Module, *, config: TrainConfig) -> None:
    """In place and one by one: what communicates between units stays outside."""
    units = [module for name, module in unit_modules(model, policy=config.plan.units).items() if name != ROOT]
    if not units:
        raise InvalidModel(
            f"train.compile = {config.train.compile!r}: the model is one unit (plan.units = {config.plan.units!r}), "
            "and only units inside it are compiled"
        )
    for module in units:
        module.compile(backend=config.train.compile)


def _go_on(training: Training, checkpoints: Checkpoints, *, place: Place) -> None:
    """Load the newest good checkpoint, if there is one, and open the data where it left off."""
    saved = checkpoints.latest()
    loaded: Loaded | None = None
    if saved is not None:
        loaded = checkpoints.load(saved, training.model, training.optimizer)
        training.step = loaded.step
        training.sampler.load_state_dict(loaded.progress["sampler"])
        if loaded.progress["scaler"]:  # empty where the run was not in fp16 before
            training.scaler.load_state_dict(loaded.progress["scaler"])
    options = training.config.train
    training.num_steps = (
        training.step + training.sharing.num_steps_after(samples_seen(training.sampler))
        if options.steps is None
        else options.steps
    )
    check_size(training.sampler, sharing=training.sharing)
    training.batches = batches_of(
        cast(Any, training.task.dataset),
        training.sampler,
        sharing=training.sharing,
        workers=training.config.data.workers,
        device=place.device,
    )
    # Last, because all of the above may draw random numbers.
    if loaded is not None and loaded.own is not None:
        restore_random_states(loaded.own, device=place.device)
    else:
        seed_everything(options.seed, step=training.step, rank=place.rank)


def _tell_start(training: Training, *, place: Place, console: Console, notes: list[str]) -> None:
    """Rank 0 speaks for all."""
    if place.rank != 0:
        return
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    config = training.config
    plan = config.plan
    num_params = sum(parameter.numel() for parameter in training.model.parameters())
    say(
        f"{config.task.model} ({num_params:,} parameters), {plan.strategy} on {place.num_ranks} × {place.device.type}, "
        f"{plan.precision}: {training.num_steps} steps of {training.sharing.step_samples} samples → {config.folder}"
    )
    if training.step:
        say(f"goes on after step {training.step}" + "".join(f"; {note}" for note in notes))
    if training.step >= training.num_steps:
        say("nothing is left to do: --set train.steps or train.epochs trains on, --fresh starts anew")


def _writers(training: Training, *, place: Place, console: Console) -> list[Writer]:
    """Rank 0 writes for all."""
    if place.rank != 0:
        return []
    config, last_step = training.config, training.step
    writers: list[Writer] = [JsonLines(config.folder / run_folder.METRICS, last_step=last_step)]
    if config.run.tensorboard:
        with suppress(ImportError):  # it is optional, and the metrics are in metrics.jsonl
            writers.append(TensorBoard(config.folder / run_folder.TENSORBOARD, last_step=last_step))
    writers.append(progress_on(console, first_step=last_step, num_steps=training.num_steps))
    return writers
