"""Sets up the same training on Hugging Face Accelerate and on Lightning Fabric.

The model and its initial values, the optimizer with its groups, the batches, the loss and the schedule are ours. The
library distributes the model, accumulates, runs backward and clips. Both use the existing process group.

                     ddp                            fsdp, shard_grad_op
    accelerate       DistributedDataParallel        fully_shard on the classes of our units (on GPUs)
    lightning        DistributedDataParallel        FSDP on the classes of our units; on a CPU, where Fabric refuses it,
                                                    fully_shard on our units (ModelParallelStrategy)

Fabric rather than the Trainer, because it is Lightning's fastest way: the loop stays ours.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.core.precision import planned_dtype
from shardwise.engine.torch_engine.prepare import rename_parameters, shard_units
from shardwise.measure.bench.gradients import plain_name
from shardwise.measure.bench.peer_setup import accumulating, job_variables, make_real, unit_classes
from shardwise.plan import Plan
from shardwise.plan.placement import placement_of
from shardwise.program.units import unit_modules
from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.training_state import Update


def by_accelerate(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    make_real(model, optimizer, plan=config.plan, device=device)
    with job_variables(device):
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
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # It keeps the job's state for the whole process, and a bench sets up twice.
    AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {"cpu": device.type == "cpu", "device_placement": False}
    placement = placement_of(plan.strategy)
    if not placement.params.is_sharded:
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(plan))
        precision = "bf16" if plan.precision == "bf16" else "no"
        return Accelerator(mixed_precision=precision, kwargs_handlers=[ddp], **options)
    classes = sorted({kind.__name__ for kind in unit_classes(model, plan=plan)})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=placement.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=classes or None,
        mixed_precision_policy=MixedPrecisionPolicy(**_dtypes(plan)),
    )
    # With `mixed_precision` it would add autocast to what the policy casts already.
    return Accelerator(mixed_precision="no", fsdp_plugin=plugin, **options)


def by_lightning(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    make_real(model, optimizer, plan=config.plan, device=device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with job_variables(device):
        fabric = _fabric(model, plan=config.plan, device=device)
        fabric.launch()
        prepared = fabric.setup_module(model, move_to_device=False)
    known = list(names.values())
    named = {plain_name(name, known=known): parameter for name, parameter in prepared.named_parameters()}
    rename_parameters(optimizer, names=names, parameters=named)
    stepped = fabric.setup_optimizers(optimizer)
    no_sync = partial(fabric.no_backward_sync, prepared)

    def clip(max_norm: float) -> Tensor:
        # To raise an error for an infinite norm, it would wait for the device.
        norm: Tensor = fabric.clip_gradients(prepared, stepped, max_norm=max_norm, error_if_nonfinite=False)
        return norm

    return prepared, optimizer, accumulating(stepped, backward=fabric.backward, clip=clip, no_sync=no_sync)


def _fabric(model: nn.Module, *, plan: Plan, device: torch.device) -> Any:
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import MixedPrecision

    placement, num_ranks = placement_of(plan.strategy), dist.get_world_size()
    # A sharded model is cast by its own policy; autocast would cast again.
    precision = "bf16-mixed" if plan.precision == "bf16" and not placement.params.is_sharded else "32-true"
    strategy: Any
    if not placement.params.is_sharded:
        strategy = DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(plan))
    elif device.type == "cpu":
        strategy = ModelParallelStrategy(
            partial(_sharded, plan=plan), data_parallel_size=num_ranks, tensor_parallel_size=1
        )
    else:
        strategy = FSDPStrategy(
            auto_wrap_policy=unit_classes(model, plan=plan) or None,
            sharding_strategy="FULL_SHARD" if placement.reshard_after_forward else "SHARD_GRAD_OP",
            mixed_precision=MixedPrecision(**_dtypes(plan)),
        )
    return Fabric(
        accelerator=device.type,
        # As if each rank were a machine with one device.
        devices=1 if device.type == "cpu" else [device.index],
        num_nodes=num_ranks,
        precision=precision,
        strategy=strategy,
        plugins=[_this_job()],
    )


def _this_job() -> Any:
    """Describe the existing process group to Fabric."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class ThisJob(LightningEnvironment):  # type: ignore[misc]
        creates_processes_externally = True

        def local_rank(self) -> int:
            return 0

        def node_rank(self) -> int:
            return dist.get_rank()

    return ThisJob()


def _sharded(model: nn.Module, mesh: Any, *, plan: Plan) -> nn.Module:
    modules = unit_modules(model, policy=plan.units)
    shard_units(model, modules, plan=plan, placements=plan.placements(modules), mesh=mesh["data_parallel"])
    return model


def _bucket_mb(plan: Plan) -> float:
    return plan.bucket_bytes / 2**20


def _dtypes(plan: Plan) -> dict[str, Any]:
    """Return the dtypes that our engine computes and reduces in."""
    return {"param_dtype": planned_dtype(plan.precision), "reduce_dtype": planned_dtype(plan.reduce_dtype)}
