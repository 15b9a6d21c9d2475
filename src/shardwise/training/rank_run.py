"""One rank's run: join the job, claim the folder, set up, resume from the newest checkpoint, then run the loop."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from shardwise.comm.groups.agreement import agree, exchange
from shardwise.comm.groups.rank_progress import PROGRESS
from shardwise.comm.groups.step_flags import StepFlags
from shardwise.comm.job.job_environment import by_our_launcher
from shardwise.comm.job.join import Place, joined
from shardwise.comm.watch.record_writer import RECORDS
from shardwise.engine.random_states import restore_random_states
from shardwise.engines import require_engine
from shardwise.state.checkpoint.checkpoints import Checkpoints
from shardwise.state.recovery.memory_key import key_for
from shardwise.state.recovery.newest import newest_state
from shardwise.state.recovery.recovery import Recovery
from shardwise.training import run_folder
from shardwise.training.config.config import TrainConfig
from shardwise.training.fitting.auto_plan import ChosenPlan, choose_plan, limit_to_budget
from shardwise.training.fitting.memory_probe import probe_memory
from shardwise.training.fitting.ran_out import memory_handled
from shardwise.training.launch.failure import report, stalls_reported
from shardwise.training.launch.folder_lock import locked
from shardwise.training.loop.loop import run_steps
from shardwise.training.loop.metrics import JsonLines, MetricsRecorder, StepMetrics, TensorBoard, Writer
from shardwise.training.loop.preemption import preemption
from shardwise.training.loop.progress import progress_on, say
from shardwise.training.loop.randomness import deterministic_kernels, seed_everything
from shardwise.training.loop.training_state import Training
from shardwise.training.resumed import batch_line, rate_line
from shardwise.training.setup import open_data, set_up

# A job that is ending may hold the folder a little longer: the worker processes of a killed rank, up to 5 s.
_LOCK_SECONDS = 10.0

OnStep = Callable[[StepMetrics], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run: after `step` of `num_steps`, stopped early (`preempted`) or not; the last step's metrics."""

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
    replan: bool = False,
    command: Sequence[str] = (),
    console: Console | None = None,
) -> Outcome:
    """Train on this rank, together with the others of its job; alone without a launcher.

    It resumes from the newest good checkpoint in the run folder; `fresh` starts at step 0.

    replan    choose the plan again for the current devices, as `auto` does
    on_step   is called on every rank with each step's metrics, in order, when they are read: every train.log_every
              steps
    command   is written into the run folder
    """
    device = None if config.run.device == "auto" else torch.device(config.run.device)
    with (
        ExitStack() as held,
        deterministic_kernels(config.train.deterministic),
        joined(device, limit_seconds=config.run.limit_seconds, on_error=report) as place,
    ):
        console = (console or Console()) if place.rank == 0 else Console(quiet=True)
        if config.plan.is_auto or replan:
            say(console, f"Choosing a plan for {config.task.model} on {place.num_ranks} × {place.device.type} …")
        chosen = choose_plan(config, place=place, fresh=fresh, replan=replan)
        return _run(chosen, on_step=on_step, fresh=fresh, command=command, console=console, held=held)


def _run(
    chosen: ChosenPlan,
    *,
    on_step: OnStep | None,
    fresh: bool,
    command: Sequence[str],
    console: Console,
    held: ExitStack,
) -> Outcome:
    config, place = chosen.config, chosen.place
    with (
        memory_handled(chosen),
        stalls_reported(),
        preemption(grace_seconds=config.checkpoint.grace_seconds) as request,
    ):
        # First, and on every rank: a driver that is missing ends all of them alike.
        place_of_checkpoints = run_folder.checkpoint_folder(config)
        earlier = run_folder.earlier_steps(config) if place.rank == 0 and not fresh else None
        notes = _claim(config, place=place, fresh=fresh, command=command, held=held)
        chosen.save()
        limit_to_budget(chosen, held=held)
        held.callback(setattr, RECORDS, "folder", RECORDS.folder)
        RECORDS.folder = config.folder
        say(console, f"Building {config.task.model} and opening its data …")
        training = set_up(config, place=place)
        training.tell = partial(say, console)
        # `memory_handled` has everything that a prediction needs.
        require_engine(training.model).predict = None
        checkpoints = Checkpoints(
            place_of_checkpoints,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            on_saved=partial(run_folder.save_step, config.folder),
            tell=training.tell,
        )
        _protect(training, flags=request.flags, held=held)
        _resume(training, checkpoints, place=place)
        _describe_start(training, notes=notes, chosen=chosen)
        if earlier is not None:
            _describe_changes(training, earlier=earlier)
        probe_memory(training, chosen=chosen)
        recorder = MetricsRecorder(_writers(training, place=place, console=console), on_step=on_step)
        with closing(recorder):
            preempted = run_steps(training, checkpoints=checkpoints, request=request, recorder=recorder)
        checkpoints.close()
        if training.recovery is not None:
            training.recovery.close()
        if config.task.is_checkpoint and not preempted:
            _save_model(training)
        if preempted:
            training.tell(f"Stopped. Checkpoint saved at step {training.step}; rerun the same command to resume.")
    return Outcome(
        step=training.step,
        num_steps=training.num_steps,
        preempted=preempted,
        last=recorder.last,
        folder=config.folder,
    )


def _save_model(training: Training) -> None:
    from shardwise.models.weights.fine_tune import save_fine_tuned

    config = training.config
    save_fine_tuned(training.model, config.folder / run_folder.MODEL, base=config.task.model.removeprefix("hf:"))
    what = "adapters" if config.task.lora is not None else "model"
    training.tell(f"The {what} for from_pretrained: {config.folder / run_folder.MODEL}")


def _claim(config: TrainConfig, *, place: Place, fresh: bool, command: Sequence[str], held: ExitStack) -> list[str]:
    """Claim the folder on rank 0; return the notes to show. An error, or a rank with another config, ends all ranks.

    `held` keeps the lock on rank 0, unless our launcher holds it for the job.
    """
    notes: list[str] = []

    def describe() -> str:
        if place.rank == 0:
            if not by_our_launcher():
                held.enter_context(locked(config.folder, wait_seconds=_LOCK_SECONDS))
            environment = run_folder.environment(device=place.device, num_ranks=place.num_ranks, command=command)
            # Ranks that are restarted after a failure resume, even with --fresh.
            from_step_0 = fresh and place.restarts == 0
            notes.extend(run_folder.claim(config, fresh=from_step_0, environment=environment))
        return "\n".join(f"{name} = {value}" for name, value in config.to_dict().items())

    agree(describe, what="configs")
    return notes


def _protect(training: Training, *, flags: StepFlags, held: ExitStack) -> None:
    """Keep snapshots in memory, if the config asks for them."""
    config = training.config
    if not config.checkpoint.memory:
        return
    key = exchange(key_for(config.folder) if training.sharing.rank == 0 else "")[0]
    options = config.checkpoint
    training.recovery = Recovery(
        key=key, flags=flags, every=options.memory_every, copies=options.copies, tell=training.tell
    )
    held.callback(training.recovery.release)


def _resume(training: Training, checkpoints: Checkpoints, *, place: Place) -> None:
    """Load the newest state, from memory or the newest good checkpoint, and open the data at its position."""
    loaded = newest_state(
        training.recovery, training.model, training.optimizer, checkpoints=checkpoints, tell=training.tell
    )
    if loaded is None:
        agree(partial(_check_nothing_saved, training.config, place=place), what="run folders")
    else:
        training.step = loaded.step
        PROGRESS.step = loaded.step + 1
        training.sampler.load_state_dict(loaded.progress["sampler"])
        if loaded.progress["scaler"]:  # empty if the run was not in fp16 before
            training.scaler.load_state_dict(loaded.progress["scaler"])
    open_data(training)
    # Last, because all of the above may draw random numbers.
    if loaded is not None and loaded.own is not None:
        restore_random_states(loaded.own, device=place.device)
    else:
        seed_everything(training.config.train.seed, step=training.step, rank=place.rank)


def _check_nothing_saved(config: TrainConfig, *, place: Place) -> str:
    if place.rank == 0:
        run_folder.refuse_if_saved(config)
    return ""


def _describe_start(training: Training, *, notes: list[str], chosen: ChosenPlan) -> None:
    tell, config, place = training.tell, training.config, chosen.place
    plan = config.plan
    num_params = sum(parameter.numel() for parameter in training.model.parameters())
    tell(
        f"{config.task.model} ({num_params:,} parameters), {plan.strategy} on {place.num_ranks} × {place.device.type}, "
        f"{plan.precision}: {training.num_steps} steps of {training.sharing.step_samples} samples → {config.folder}"
    )
    if said := chosen.recorded("said"):
        tell(f"auto: {said}")
    if training.step:
        tell(f"Resuming after step {training.step}" + "".join(f"; {note}" for note in notes))
    if training.step >= training.num_steps:
        tell("Nothing is left to do: --set train.steps or train.epochs to train further, or --fresh to start again.")


def _describe_changes(training: Training, *, earlier: tuple[TrainConfig, int | None]) -> None:
    """Say that the steps of a resumed run have other samples, or another learning rate."""
    before, samples = earlier
    sharing = training.sharing
    lines = [
        batch_line(samples, now=sharing.step_samples, num_ranks=sharing.num_ranks),
        rate_line(before, now=training.config, step=training.step, num_steps=training.num_steps),
    ]
    for line in lines:
        if line is not None and 0 < training.step < training.num_steps:
            training.tell(f"Changed: {line}")


def _writers(training: Training, *, place: Place, console: Console) -> list[Writer]:
    if place.rank != 0:
        return []
    config, last_step = training.config, training.step
    writers: list[Writer] = [JsonLines(config.folder / run_folder.METRICS, last_step=last_step)]
    if config.run.tensorboard:
        with suppress(ImportError):  # it is optional, and the metrics are in metrics.jsonl
            writers.append(TensorBoard(config.folder / run_folder.TENSORBOARD, last_step=last_step))
    writers.append(progress_on(console, first_step=last_step, num_steps=training.num_steps))
    return writers
