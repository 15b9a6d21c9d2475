"""A training before its first step: the task, the model with its plan, the optimizer, the data.

`train` and the benchmark both set up here, so that they run the same training. A benchmark changes `by`, which
prepares the model and the optimizer, and takes a step with them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidData
from shardwise.comm.groups.collectives import Collectives
from shardwise.comm.job.join import Place
from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.engines import prepare
from shardwise.models.tasks import Task
from shardwise.training.config.config import TrainConfig
from shardwise.training.loading.sampler import DistributedSampler
from shardwise.training.loop.batches import Sharing, batches_of, check_size, samples_seen
from shardwise.training.loop.optimizers import make_optimizer
from shardwise.training.loop.randomness import seed_everything
from shardwise.training.loop.training_state import Training, Update
from shardwise.training.loop.update import update


class Ready(Protocol):
    """Prepares a model, which may be on the meta device, and its optimizer for training. Collective."""

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
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, Optimizer, Update]:
    """Prepare with the plan's engine. `collectives` replaces ours, to measure without communication."""
    model, optimizer = prepare(
        model,
        optimizer,
        config.plan,
        device=device,
        collectives=collectives,
        watch_seconds=config.run.watch_seconds,
        compare_every=config.train.compare_every,
        weights=weights,
    )
    return model, optimizer, update


def set_up(config: TrainConfig, *, place: Place, by: Ready = by_plan) -> Training:
    """Return a training before its first step; its data are not open yet."""
    # The same weights for any number of ranks; they come from rank 0.
    seed_everything(config.train.seed, step=0, rank=0)
    task = _load_task(config, device=place.device)
    optimizer = make_optimizer(task.model, config.optimizer)
    if task.weights is not None:
        if by is not by_plan:
            raise InvalidData(f"task.model = {config.task.model!r}: checkpoints can be trained, but not benchmarked")
        by = partial(by_plan, weights=task.weights)
    model, optimizer, update = by(task.model, optimizer, config=config, device=place.device)
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
        update=update,
    )


def open_data(training: Training) -> None:
    """Set the number of steps, and read data from the sampler's position on."""
    steps = training.config.train.steps
    if steps is None:
        steps = training.step + training.sharing.num_steps_after(samples_seen(training.sampler))
    training.num_steps = steps
    check_size(training.sampler, sharing=training.sharing)
    open_batches(training)


def open_batches(training: Training) -> None:
    training.batches = batches_of(
        cast(Any, training.task.dataset),
        training.sampler,
        sharing=training.sharing,
        workers=training.config.data.workers,
        device=training.device,
    )


def _load_task(config: TrainConfig, *, device: torch.device) -> Task:
    section, plan = config.task, config.plan
    if section.is_checkpoint:
        # A frozen base stays in the dtype of its files, which needs no fp32 copy.
        native = plan.precision == "native" or (section.lora is not None and plan.precision == "bf16")
        task = replace(section.named(), adaptation=section.adaptation).weights(
            dataset=section.dataset, tokenizer=section.tokenizer, native=native, device=device
        )
    else:
        # Catalogue models are made on the meta device: `prepare` fills only the slices of this rank.
        task = section.named().task(dataset=section.dataset)
    if task.dataset is None:
        raise InvalidData(f"task.model = {section.model!r} brings no dataset: set task.dataset")
    if config.train.eval_every and (task.evaluate is None or task.eval_dataset is None):
        lacks = "evaluate" if task.evaluate is None else "eval_dataset"
        raise InvalidData(f"train.eval_every = {config.train.eval_every}, but the task has no {lacks}: leave it out")
    return task
