"""`prepare_on_torch`: a plan on torch's own DistributedDataParallel or `fully_shard`.

The plan's prefetch and reduces_in_flight have no effect: both of torch's engines have their own schedule.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.comm.groups.agreement import check_alike, together
from shardwise.comm.job.join import join_job
from shardwise.engine.activations.compiled_units import check_compile, compile_units
from shardwise.engine.carry import carry_engine
from shardwise.engine.core.precision import planned_dtype
from shardwise.engine.guards.carried import broadcast_carried
from shardwise.engine.guards.description import (
    advise_on_segments,
    asked_device,
    check_gradients,
    check_precision,
    describe,
    warn_hardly_cut,
)
from shardwise.engine.optimizer.known import StaleOptimizer, check_parameters, describe_optimizer
from shardwise.engine.torch_engine.plain_model import is_on_torch
from shardwise.engine.torch_engine.refuse import check_plan, check_replicated, check_sharded
from shardwise.engine.torch_engine.torch_engine import TorchEngine
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.spec import ROOT, ModelSpec
from shardwise.program.units import CutModel, cut_model
from shardwise.program.units.materialize import materialize

AnyOptimizer = TypeVar("AnyOptimizer", Optimizer, None)


def prepare_on_torch(
    model: nn.Module, optimizer: AnyOptimizer, plan: Plan, *, device: torch.device | str | None = None
) -> tuple[nn.Module, AnyOptimizer]:
    """Make `model` and `optimizer` run `plan` on torch's own engine; train what is returned with an ordinary loop.

    Collective. Without a process group it joins the job, as `prepare` of our engine does. Values come from rank 0.

    ddp                   returns the model inside a DistributedDataParallel
    fsdp, shard_grad_op   returns the same model, with `fully_shard` on each unit; its parameters are new (DTensors)

    A model on the meta device is filled whole on every rank before it is sharded. The optimizer keeps its options,
    and gets the new parameters by name.
    """
    if is_on_torch(model):
        raise InvalidModel(f"this {type(model).__name__} has been through shardwise.prepare already")
    chosen = join_job(asked_device(model, device=device))
    mesh = plan.mesh or Mesh(shard=dist.get_world_size())
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def checked() -> tuple[CutModel, dict[str, Placement]]:
        units = cut_model(model, policy=plan.units)
        placements = _check(model, units.spec, plan=plan, mesh=mesh)
        if optimizer is not None:
            _check_optimizer(optimizer, names=names)
        return units, placements

    units, placements = together(checked)
    described = describe(model, spec=units.spec, plan=plan)
    if optimizer is not None:
        described += "\n" + describe_optimizer(optimizer, names=names)
    check_alike(described, what="plans, models or optimizers")
    warn_hardly_cut(units.spec, plan=plan, mesh=mesh)
    advise_on_segments(plan, spec=units.spec, mesh=mesh, device=chosen)
    materialize(model, device=chosen)
    model.to(chosen)
    to_master_dtype(model, plan=plan)
    broadcast_carried(model, device=chosen)
    compile_units(units.modules, plan=plan)
    prepared = model
    if placements[ROOT].params.is_sharded:
        device_mesh = _device_mesh(mesh, device=chosen)
        shard_units(model, units.modules, plan=plan, placements=placements, mesh=device_mesh)
    else:
        prepared = _replicate(model, plan=plan, device=chosen)
    if optimizer is not None:
        rename_parameters(optimizer, names=names, parameters=dict(model.named_parameters()))
    carry_engine(prepared, TorchEngine(prepared, plan))
    return prepared, optimizer


class AutocastDataParallel(DistributedDataParallel):
    """DistributedDataParallel whose forward runs under autocast.

    Parameters stay float32. Autocast chooses the dtype operation by operation (norms and losses stay in float32),
    and casts a weight in every forward that uses it; the copy lives until backward has read it.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any]):
        super().__init__(model, **options)
        self._autocast = torch.autocast(device.type, dtype=dtype)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self._autocast:
            return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]


def _replicate(model: nn.Module, *, plan: Plan, device: torch.device) -> DistributedDataParallel:
    """Wrap the model in DDP, whose constructor broadcasts rank 0's values.

    Without `static_graph`, which forbids freezing and unfreezing parameters and is no faster.
    """
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": plan.bucket_bytes / 2**20}
    if plan.precision in ("bf16", "fp16"):
        return AutocastDataParallel(model, dtype=planned_dtype(plan.precision), device=device, options=options)
    return DistributedDataParallel(model, **options)  # type: ignore[arg-type]


def shard_units(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    *,
    plan: Plan,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
) -> None:
    """Call `fully_shard` on every unit, inner ones first: an outer call takes the parameters that are left.

    The root is not freed after forward, as under our engine: backward needs it first.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    policy = MixedPrecisionPolicy()
    if plan.precision != "native":
        policy = MixedPrecisionPolicy(
            param_dtype=planned_dtype(plan.precision), reduce_dtype=planned_dtype(plan.reduce_dtype)
        )
    for name, module in reversed(list(modules.items())):
        reshard = name != ROOT and placements[name].reshard_after_forward
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def _device_mesh(mesh: Mesh, *, device: torch.device) -> DeviceMesh:
    if mesh.replicate == 1:
        return init_device_mesh(device.type, (mesh.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))


def _check(model: nn.Module, spec: ModelSpec, *, plan: Plan, mesh: Mesh) -> dict[str, Placement]:
    """Return the placement of each unit; raise for a plan or model that cannot run."""
    mesh.check_ranks(dist.get_world_size())
    placements = plan.placements(unit.name for unit in spec.units)
    check_plan(plan, placements=placements)
    check_compile(placements, plan=plan)
    check_precision(model, plan=plan)
    check_gradients(model)
    if placements[ROOT].params.is_sharded:
        check_sharded(spec, plan=plan)
    else:
        check_replicated(spec)
    return placements


def to_master_dtype(model: nn.Module, *, plan: Plan) -> None:
    """Make floating-point parameters float32, whatever dtype computes, unless the plan leaves dtypes alone.

    A frozen parameter that is given in the dtype that computes stays in it: no optimizer steps it.
    """
    if plan.precision == "native":
        return
    for parameter in model.parameters():
        is_held = not parameter.requires_grad and parameter.dtype == planned_dtype(plan.precision)
        if parameter.is_floating_point() and not is_held:
            parameter.data = parameter.data.float()


def _check_optimizer(optimizer: Optimizer, *, names: Mapping[int, str]) -> None:
    if optimizer.state:
        raise StaleOptimizer(
            "the optimizer has stepped before: hand a fresh one to shardwise.prepare, then load the old state "
            "with shardwise.load_full_state_dict"
        )
    check_parameters(optimizer, known=names)


def rename_parameters(
    optimizer: Optimizer, *, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Replace each parameter in the optimizer's groups by the parameter that has its name now."""
    for group in optimizer.param_groups:
        group["params"][:] = [parameters[names[id(parameter)]] for parameter in group["params"]]
