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

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.bench.gradients import plain_name
from shardwise.bench.peer_setup import accumulating, make_real, told_of_the_group, unit_classes
from shardwise.engine.core.precision import planned_dtype
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, placement_of
from shardwise.torch_engine.prepare import rename_parameters, shard_units
from shardwise.train.config import TrainConfig
from shardwise.train.loop import Update
from shardwise.units import unit_modules


def by_accelerate(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    """`Accelerator.prepare`."""
    make_real(model, optimizer, plan=config.plan, device=device)
    with told_of_the_group(device):
        accelerator = _accelerator(model, plan=config.plan, device=device)
        prepared, stepped = accelerator.prepare(model, optimizer)

    def no_sync(enabled: bool) -> AbstractContextManager[None]:
        return accelerator.no_sync(prepared) if enabled else nullcontext()

    def clip(max_norm: float) -> Tensor:
        norm: Tensor = accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
        return norm

    return prepared, optimizer, accumulating(stepped, backward=accelerator.backward, clip=clip, no_sync=no_sync)


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
    classes = sorted({kind.__name__ for kind in unit_classes(model, plan=plan)})
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
    make_real(model, optimizer, plan=config.plan, device=device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with told_of_the_group(device):
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

    return prepared, optimizer, accumulating(stepped, backward=fabric.backward, clip=clip, no_sync=no_sync)


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
            auto_wrap_policy=unit_classes(model, plan=plan) or None,
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


def _sharded(model: nn.Module, mesh: Any, *, plan: Plan) -> nn.Module:
    placements = plan.placements(unit_modules(model, policy=plan.units))
    shard_units(model, plan=plan, placements=placements, mesh=mesh["data_parallel"])
    return model


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
