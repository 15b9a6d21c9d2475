"""torch's own engines by the protocol."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.engine.prepared.uneven import summed
from shardwise.engine.protocol import Batch, TrainingEngine
from shardwise.plan import Plan
from shardwise.torch_engine import full_state
from shardwise.torch_engine.plain_model import PlainModel


class TorchEngine(PlainModel, TrainingEngine):
    """DistributedDataParallel, or `fully_shard` on each unit, under one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan_of(self, model: nn.Module) -> Plan:
        return self._plan

    # Plans and steps

    def replan(self, model: nn.Module, plan: Plan) -> None:
        self.check("replan", model)

    def fixed_by(self, model: nn.Module, plan: Plan) -> str:
        return "torch's engine"

    @contextmanager
    def accumulate(self, model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
        """Use DDP's `no_sync`, or `set_requires_gradient_sync(False)`. The forward has to run inside as well."""
        if not enabled:
            yield
        elif isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        else:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)

    def mean_count(self, model: nn.Module, count: float) -> float:
        device = next(model.parameters()).device
        return summed(count, device=device) / dist.get_world_size()

    def join(self, model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
        self.check("join", model)
        return iter(batches)

    def concerns(self, model: nn.Module, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Do nothing: the model's parameters are what an optimizer steps."""

    def showing_parameters(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        return nullcontext()

    def announce_loss(self, model: nn.Module, loss: Tensor) -> None:
        """torch's engines wait for no loss."""

    def settle(self, model: nn.Module) -> None:
        """Do nothing: torch's engines leave no collective in flight after a step."""

    def omit_memory_advice(self, model: nn.Module) -> None:
        """Do nothing: torch's errors carry no advice."""

    # Weights

    def edit(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: each shard lies on one rank, and DDP's parameters are the optimizer's."""
        return nullcontext()

    def whole(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
        self.check("whole", model)
        return nullcontext()

    def weight_stream(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return full_state.weight_stream(self.bare(model), dtype=dtype)

    full_state_dict = staticmethod(full_state.full_state_dict)
    load_full_state_dict = staticmethod(full_state.load_full_state_dict)

    # Gradients

    clip_grad_norm_ = staticmethod(full_state.clip_grad_norm_)
    clip_grad_value_ = staticmethod(full_state.clip_grad_value_)

    def grad_norms(self, model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
        return full_state.grad_norms(self.bare(model), norm_type=norm_type)

    def buckets(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {}
