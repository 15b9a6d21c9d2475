"""Sets up the training that a bench measures: that of `shardwise train`, on the requested engine."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.groups.collectives import BackendCollectives, Collectives
from shardwise.comm.job.absent import AbsentCollectives, leave_out_reduce
from shardwise.comm.job.join import Place
from shardwise.engines import find_engine
from shardwise.measure.bench.run_files import BenchRun
from shardwise.measure.profile.traceless import TracelessCollectives, lending_broadcasts
from shardwise.plan.limits import LIMITS
from shardwise.program.spec import ModelSpec
from shardwise.program.units import model_spec, unit_modules
from shardwise.training.config.config import TrainConfig
from shardwise.training.launch.failure import during
from shardwise.training.loop.loop import take_step
from shardwise.training.loop.metrics import Taken
from shardwise.training.loop.randomness import seed_everything
from shardwise.training.loop.training_state import Training, Update
from shardwise.training.loop.update import update
from shardwise.training.setup import Ready, by_plan, open_data, set_up


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTraining:
    """A running training; `spec` and `modules` (its units by name) are from before an engine prepared the model."""

    training: Training
    spec: ModelSpec
    modules: Mapping[str, nn.Module]

    @property
    def trained_names(self) -> list[str]:
        return [param.name for unit in self.spec.units for param in unit.params if param.trainable]

    def step(self) -> Taken:
        with during(f"step {self.training.step + 1}"):
            return take_step(self.training)

    def settle(self) -> None:
        """Wait for the device, and for the gathers that our update has started."""
        engine = find_engine(self.training.model)
        if engine is not None:
            engine.settle()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)


def start(run: BenchRun, *, place: Place, to_be_recorded: bool = False) -> BenchTraining:
    """Set up the training and open its data. Collective, except in a silent run."""
    config = run.config
    before: list[tuple[ModelSpec, Mapping[str, nn.Module]]] = []
    by = _engine(run.engine, collectives=_collectives(run, place=place, to_be_recorded=to_be_recorded))

    def ready(model: nn.Module, optimizer: Optimizer, **where: Any) -> tuple[nn.Module, Optimizer, Update]:
        before.append((model_spec(model, policy=config.plan.units), unit_modules(model, policy=config.plan.units)))
        return by(model, optimizer, **where)

    with lending_broadcasts() if to_be_recorded and place.device.type == "cpu" else nullcontext():
        training = set_up(config, place=place, by=ready)
    if run.silent:
        leave_out_reduce(training.model)
    if place.device.type == "cuda":
        # Memory that only initialising the model needed is not part of a step.
        torch.cuda.empty_cache()
    open_data(training)
    # Last, since all of the above may draw random numbers.
    seed_everything(config.train.seed, step=0, rank=place.rank)
    ((spec, modules),) = before
    return BenchTraining(training=training, spec=spec, modules=modules)


def _engine(name: str, *, collectives: Collectives | None) -> Ready:
    """Return the function that prepares the model. Other libraries are imported only if one is requested."""
    if name in ("shardwise", "captured", "compiled", "torch"):
        return partial(by_plan, collectives=collectives)
    if name in ("torch-captured", "torch-compiled"):
        return partial(_captured_by_hand, by=_by_torch)
    from shardwise.measure.bench.deepspeed_peer import by_deepspeed
    from shardwise.measure.bench.megatron_peer import by_megatron
    from shardwise.measure.bench.peers import by_accelerate, by_lightning

    peers: dict[str, Ready] = {
        "accelerate": by_accelerate,
        "lightning": by_lightning,
        "deepspeed": by_deepspeed,
        "megatron-fsdp": by_megatron,
        "megatron-fsdp-captured": partial(_captured_by_hand, by=partial(by_megatron, captured=True)),
    }
    return peers[name]


def _by_torch(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    """Prepare as by_plan does, with the plain step, which is then captured by hand."""
    model, optimizer, _ = by_plan(model, optimizer, config=config, device=device)
    return model, optimizer, update


def _captured_by_hand(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device, by: Ready
) -> tuple[nn.Module, Optimizer, Update]:
    """Set up on a side stream, since autograd remembers the stream on which it accumulated a gradient."""
    from shardwise.measure.bench.graph_update import GraphUpdate, counts_on_device, on_stream

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    counts_on_device(optimizer, device=device)
    with on_stream(stream):
        prepared, optimizer, step = by(model, optimizer, config=config, device=device)
    return prepared, optimizer, GraphUpdate(step, stream=stream)


def _collectives(run: BenchRun, *, place: Place, to_be_recorded: bool) -> Collectives | None:
    """Return the collectives that our engine uses instead of its own, if any."""
    plan = run.config.plan
    if LIMITS[plan.engine].why_not_call("prepare", plan, arguments=["collectives"]) is not None:
        return None
    if run.silent:
        return AbsentCollectives()
    if to_be_recorded and place.device.type == "cpu" and plan.collectives == "backend":
        return TracelessCollectives(inner=BackendCollectives())
    return None
