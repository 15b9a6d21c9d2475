"""A training before its first step: the task, the model with its plan, the optimizer, the data.

`train` and the benchmark set up here, so that they do the same training; what a benchmark changes is `by`: who makes
the model and the optimizer ready to be trained, and takes a step with them.
"""

from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.collectives import Collectives
from shardwise.comm.join import Place
from shardwise.data.sampler import DistributedSampler
from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engines import prepare
from shardwise.errors import InvalidData
from shardwise.tasks import Task, load_task
from shardwise.train.batches import Sharing, batches_of, check_size, samples_seen
from shardwise.train.captured_update import CapturedUpdate
from shardwise.train.config import TrainConfig
from shardwise.train.loop import Training, Update
from shardwise.train.optimizers import make_optimizer
from shardwise.train.randomness import seed_everything


class Ready(Protocol):
    """Makes a model, which may be on the meta device, and its optimizer ready to be trained. Collective."""

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
    ) -> tuple[nn.Module, Optimizer, Update]: ...


def by_plan(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    config: TrainConfig,
    device: torch.device,
    collectives: Collectives | None = None,
) -> tuple[nn.Module, Optimizer, Update]:
    """On the engine that the plan names. `collectives` replaces those of ours, to measure without a wire."""
    model, optimizer = prepare(
        model,
        optimizer,
        config.plan,
        device=device,
        collectives=collectives,
        watch_seconds=config.run.watch_seconds,
        compare_every=config.train.compare_every,
    )
    return model, optimizer, CapturedUpdate(model, optimizer)


def set_up(config: TrainConfig, *, place: Place, by: Ready = by_plan) -> Training:
    """A training that has taken no step, whose data are not open yet."""
    # The same weights whatever the number of ranks; they come from rank 0.
    seed_everything(config.train.seed, step=0, rank=0)
    task = _load_task(config)
    optimizer = make_optimizer(task.model, config.optimizer)
    model, optimizer, step = by(task.model, optimizer, config=config, device=place.device)
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
        update=step,
    )


def open_data(training: Training) -> None:
    """From where the sampler stands; now it is known how many steps there are."""
    options = training.config.train
    training.num_steps = (
        training.step + training.sharing.num_steps_after(samples_seen(training.sampler))
        if options.steps is None
        else options.steps
    )
    check_size(training.sampler, sharing=training.sharing)
    open_batches(training)


def open_batches(training: Training) -> None:
    """Read on from where the sampler stands."""
    training.batches = batches_of(
        cast(Any, training.task.dataset),
        training.sampler,
        sharing=training.sharing,
        workers=training.config.data.workers,
        device=training.device,
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
