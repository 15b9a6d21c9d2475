"""The same training by Hugging Face Accelerate and by Lightning Fabric, in their own ways.

Everything around it is ours and the same: the model with its first values, the optimizer with its groups, the batches,
the loss, the schedule. Theirs is how the model is distributed, how a pass accumulates, backward and clipping. Both
take over the process group that is there.

                     ddp                            fsdp, shard_grad_op
    accelerate       DistributedDataParallel        fully_shard at our units' classes (on GPUs)
    lightning        DistributedDataParallel        FSDP at our units' classes; on a CPU, where Fabric refuses it,
                                                    fully_shard on our units (ModelParallelStrategy)

Fabric and not the Trainer: it is Lightning's fastest way, since the loop stays ours.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from shardwise.bench.gradients import plain_name
from shardwise.comm.dtensor import dtensor_types
from shardwise.engine.activations.compiled_units import compile_units
from shardwise.engine.params.precision import planned_dtype
from shardwise.materialize import materialize
from shardwise.placement import SHARDED, placement_of
from shardwise.plan import Plan
from shardwise.spec import ROOT
from shardwise.torch_engine.prepare import rename_parameters, shard_units, to_master_dtype
from shardwise.train.batches import to_device
from shardwise.train.config import TrainConfig
from shardwise.train.loop import Training, Update
from shardwise.units import unit_modules


def by_accelerate(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    """`Accelerator.prepare`."""
    _make_real(model, optimizer, plan=config.plan, device=device)
    with _told_of_the_group(device):
        accelerator = _accelerator(model, plan=config.plan, device=device)
        prepared, stepped = accelerator.prepare(model, optimizer)

    def no_sync(enabled: bool) -> AbstractContextManager[None]:
        return accelerator.no_sync(prepared) if enabled else nullcontext()

    def clip(max_norm: float) -> Tensor:
        norm: Tensor = accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
        return norm

    return prepared, optimizer, _update(stepped, backward=accelerator.backward, clip=clip, no_sync=no_sync)


def _accelerator(model: nn.Module, *, plan: Plan, device: torch.device) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    # What it knows of the job it keeps for the whole process; a bench sets up twice.
    AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {"cpu": device.type == "cpu", "device_placement": False}
    placement = placement_of(plan.strategy)
    if placement.params is not SHARDED:
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(plan))
        return Accelerator(mixed_precision=_mixed(plan), kwargs_handlers=[ddp], **options)
    classes = sorted({kind.__name__ for kind in _unit_classes(model, plan=plan)})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=placement.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=classes or None,
        mixed_precision_policy=_policy(plan),
    )
    # With `mixed_precision` it would put autocast around what the policy casts already.
    return Accelerator(mixed_precision="no", fsdp_plugin=plugin, **options)


def by_lightning(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    """`Fabric.setup_module` and `setup_optimizers`."""
    _make_real(model, optimizer, plan=config.plan, device=device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with _told_of_the_group(device):
        fabric = _fabric(model, plan=config.plan, device=device)
        fabric.launch()
        prepared = fabric.setup_module(model, move_to_device=False)
    known = list(names.values())
    named = {plain_name(name, known=known): parameter for name, parameter in prepared.named_parameters()}
    rename_parameters(optimizer, names=names, parameters=named)
    stepped = fabric.setup_optimizers(optimizer)
    no_sync = partial(fabric.no_backward_sync, prepared)

    def clip(max_norm: float) -> Tensor:
        # To raise where the norm is infinite, it would wait for the device.
        norm: Tensor = fabric.clip_gradients(prepared, stepped, max_norm=max_norm, error_if_nonfinite=False)
        return norm

    return prepared, optimizer, _update(stepped, backward=fabric.backward, clip=clip, no_sync=no_sync)


def _fabric(model: nn.Module, *, plan: Plan, device: torch.device) -> Any:
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    placement, num_ranks = placement_of(plan.strategy), dist.get_world_size()
    # What is sharded is cast by a policy of its own; autocast around it would cast again.
    precision = "bf16-mixed" if plan.precision == "bf16" and placement.params is not SHARDED else "32-true"
    strategy: Any
    if placement.params is not SHARDED:
        strategy = DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(plan))
    elif device.type == "cpu":
        strategy = ModelParallelStrategy(
            partial(_sharded, plan=plan), data_parallel_size=num_ranks, tensor_parallel_size=1
        )
    else:
        strategy = FSDPStrategy(
            auto_wrap_policy=_unit_classes(model, plan=plan) or None,
            sharding_strategy="FULL_SHARD" if placement.reshard_after_forward else "SHARD_GRAD_OP",
            mixed_precision=_flat_policy(plan),
        )
    return Fabric(
        accelerator=device.type,
        # As if each rank were a machine with one device, which may be any.
        devices=1 if device.type == "cpu" else [device.index],
        num_nodes=num_ranks,
        precision=precision,
        strategy=strategy,
        plugins=[_this_job()],
    )


def _this_job() -> Any:
    """What Fabric asks of whoever has started its processes, told by the group that is there."""
    from lightning.fabric.plugins.environments import ClusterEnvironment

    class ThisJob(ClusterEnvironment):  # type: ignore[misc]
        creates_processes_externally = True
        # Of a rendezvous that has been.
        main_address, main_port = "127.0.0.1", 0

        @staticmethod
        def detect() -> bool:
            return dist.is_initialized()

        def world_size(self) -> int:
            return dist.get_world_size()

        def set_world_size(self, size: int) -> None:
            assert size == dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def set_global_rank(self, rank: int) -> None:
            assert rank == dist.get_rank()

        def local_rank(self) -> int:
            return 0

        def node_rank(self) -> int:
            return dist.get_rank()

    return ThisJob()


@contextmanager
def _told_of_the_group(device: torch.device) -> Iterator[None]:
    """The variables by which others know of a job, said of the group that is there; all on one machine, where the
    number of a rank is by their rule the one of its device.

    What else they change for the whole process is put back: variables, and the number of threads, which shall be the
    same for all engines.
    """
    rank, num_ranks, threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    local_rank = rank if device.index is None else device.index
    said = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    told = {name: str(value) for name, value in said.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


def _update(
    optimizer: Any,
    *,
    backward: Callable[[Tensor], Any],
    clip: Callable[[float], Tensor],
    no_sync: Callable[[bool], AbstractContextManager[None]],
) -> Update:
    """train/loop.update, by the means of others."""

    def update(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
        total = torch.zeros((), device=training.device)
        for number, (weight, batch) in enumerate(zip(weights, batches, strict=True)):
            with no_sync(number + 1 < len(batches)):
                loss = training.task.loss(training.model, to_device(batch, training.device)) * weight
                backward(loss)
            total += loss.detach()
        norm = clip(training.config.train.clip_norm) if training.config.train.clip_norm else None
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.full_tensor() if isinstance(norm, dtensor_types()) else norm

    return update


def _make_real(model: nn.Module, optimizer: Optimizer, *, plan: Plan, device: torch.device) -> None:
    """On the device, with the values of rank 0, in fp32; units that are computed again in backward are marked so."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    materialize(model, device=device)
    model.to(device)
    to_master_dtype(model, plan=plan)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    rename_parameters(optimizer, names=names, parameters=dict(model.named_parameters()))
    units = unit_modules(model, policy=plan.units)
    compile_units(units, plan=plan)
    for name, module in units.items():
        if plan.recompute_of(name) == "full":
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _sharded(model: nn.Module, mesh: Any, *, plan: Plan) -> nn.Module:
    placements = plan.placements(unit_modules(model, policy=plan.units))
    shard_units(model, plan=plan, placements=placements, mesh=mesh["data_parallel"])
    return model


def _unit_classes(model: nn.Module, *, plan: Plan) -> set[type[nn.Module]]:
    return {type(module) for name, module in unit_modules(model, policy=plan.units).items() if name != ROOT}


def _bucket_mb(plan: Plan) -> float:
    return plan.bucket_bytes / 2**20


def _mixed(plan: Plan) -> str:
    return "bf16" if plan.precision == "bf16" else "no"


def _policy(plan: Plan) -> Any:
    """As our engine: computes in the plan's precision, reduces in its own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=planned_dtype(plan.precision), reduce_dtype=planned_dtype(plan.reduce_dtype)
    )


def _flat_policy(plan: Plan) -> Any:
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(param_dtype=planned_dtype(plan.precision), reduce_dtype=planned_dtype(plan.reduce_dtype))
