"""The process of a rehearsal: `python -m shardwise.measure.profile.rehearsal_process ASKED.json FOUND.json`.

It takes a few steps to warm up, records one, and then times some without the recording.
"""

import json
import pickle
import platform
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import read_json
from shardwise.comm.job.absent import AbsentCollectives, absent_group, leave_out_reduce
from shardwise.comm.job.job_environment import Start
from shardwise.comm.job.join import joined
from shardwise.engines import prepare
from shardwise.measure.profile.cuda_allocations import AllocatorHistory
from shardwise.measure.profile.recording import WARM_UP_STEPS, Recording, StepRecording, allocations_on
from shardwise.measure.profile.rehearsal import Measured, Rehearsal
from shardwise.models.muon import MuonWithAdamW, split_off_matrices
from shardwise.models.tasks import Task, load_task
from shardwise.plan.limits import LIMITS
from shardwise.program.spec import ModelSpec
from shardwise.program.units import model_spec, unit_modules


def rehearse(rehearsal: Rehearsal) -> Measured:
    """Run one rank in this process, which must not have joined a job."""
    device = torch.device("cuda", 0) if rehearsal.device == "cuda" else torch.device("cpu")
    on_gpu = device.type == "cuda"
    with _group(rehearsal, device=device):
        with allocations_on(device, stacks=rehearsal.history is not None) as live:
            training = _started(rehearsal, device=device)
            recording = _record(training, live=live)
        counted = torch.cuda.max_memory_allocated() if on_gpu else None
        reserved = torch.cuda.max_memory_reserved() if on_gpu else None
        if rehearsal.history is not None:
            assert isinstance(live, AllocatorHistory)
            with atomic_write(rehearsal.history) as file:
                pickle.dump(live.snapshot, file)
        seconds = tuple(_timed(training) for _ in range(rehearsal.steps))
    return Measured(
        ledger=recording.ledger(),
        counted_bytes=counted,
        reserved_bytes=reserved,
        step_seconds=seconds,
        device_name=torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """A running training. `model` is what `prepare` returned; it is or contains `task.model`."""

    task: Task
    spec: ModelSpec
    modules: dict[str, nn.Module]
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    device: torch.device

    def step(self) -> None:
        self.task.loss(self.model, self.batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _started(rehearsal: Rehearsal, *, device: torch.device) -> _Training:
    """Prepare a model straight from the meta device."""
    torch.manual_seed(0)
    task = load_task(rehearsal.model, seq=rehearsal.seq, image=rehearsal.image, device="meta")
    spec = model_spec(task.model, policy=rehearsal.plan.units)
    modules = unit_modules(task.model, policy=rehearsal.plan.units)
    absent, plan = rehearsal.num_ranks > 1, rehearsal.plan
    replaces = LIMITS[plan.engine].why_not_call("prepare", plan, arguments=["collectives"]) is None
    model, optimizer = prepare(
        task.model,
        _optimizer(rehearsal.optimizer, task.model, device=device),
        plan,
        device=device,
        collectives=AbsentCollectives() if absent and replaces else None,
    )
    if absent:
        leave_out_reduce(model)
    if device.type == "cuda":
        # Memory that only initialising the model needed is not part of a step.
        torch.cuda.empty_cache()
    with _InsteadOfMeta(device):
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), task.make_batch(rehearsal.batch))
    return _Training(
        task=task, spec=spec, modules=modules, model=model, optimizer=optimizer, batch=batch, device=device
    )


def _record(training: _Training, *, live: Recording) -> StepRecording:
    model, optimizer, spec = training.model, training.optimizer, training.spec
    recording = StepRecording(
        live, model=model, optimizer=optimizer, spec=spec, modules=training.modules, device=training.device
    )
    recording.batch = training.batch
    with recording.attached():
        for _ in range(WARM_UP_STEPS):
            training.step()
        with recording.step():
            training.step()
    return recording


def _timed(training: _Training) -> float:
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    training.step()
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _group(rehearsal: Rehearsal, *, device: torch.device) -> AbstractContextManager[object]:
    """Join a job whose other ranks are absent, or a real job of one rank, whatever the environment says."""
    if rehearsal.num_ranks == 1:
        return joined(device, start=Start())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return absent_group(rehearsal.num_ranks)


def _optimizer(name: str, model: nn.Module, *, device: torch.device) -> Optimizer:
    """Make an optimizer with the kernels that the planner knows; torch's default on a CPU depends on its version."""
    on_gpu = device.type == "cuda"
    fused, foreach = (True if on_gpu else None), (None if on_gpu else False)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=foreach)
    if name == "muon":
        matrices, others = split_off_matrices(model)
        groups: list[dict[str, Any]] = [{"params": others}]
        return MuonWithAdamW(matrices, groups, lr=1e-4, muon={}, adamw={"fused": fused, "foreach": foreach})
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=1e-4, fused=fused, foreach=foreach)


class _InsteadOfMeta(TorchFunctionMode):
    """Makes tensors that are requested on the meta device on another one, with values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device")) == "meta":
            options["device"] = self.device
        return function(*args, **options)


def main(asked: str, found: str) -> None:
    try:
        measured = rehearse(Rehearsal.from_data(read_json(asked)))
    except ShardwiseError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    Path(found).write_text(json.dumps(measured.to_data()))


if __name__ == "__main__":
    main(*sys.argv[1:])
