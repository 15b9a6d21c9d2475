"""torch's own engines, by the methods of ours (engine/our_engine.py)."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.engine.prepared.uneven import Batch, summed
from shardwise.engine.torch_engine import full_state
from shardwise.engine.torch_engine.plain_model import PlainModel
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS


class TorchEngine(PlainModel):
    """DistributedDataParallel, or `fully_shard` on each unit, under one plan."""

    plan: Plan
    # torch's errors carry no predictions of ours.
    predict: None = None

    # Plans and steps

    def _check(self, function: str) -> None:
        """Raise InvalidPlan for a function that torch's engines do not have."""
        LIMITS[self.plan.engine].check_call(function, self.plan)

    def replan(self, plan: Plan) -> None:
        self._check("replan")

    def fixed_by(self, plan: Plan) -> str:
        return "torch's engine"

    @contextmanager
    def accumulate(self, *, enabled: bool = True) -> Iterator[None]:
        """Use DDP's `no_sync`, or `set_requires_gradient_sync(False)`. The forward has to run inside as well."""
        if not enabled:
            yield
        elif isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)

    def mean_count(self, count: float) -> float:
        device = next(self.model.parameters()).device
        return summed(count, device=device) / dist.get_world_size()

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self._check("join")
        return iter(batches)

    def concerns(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in self.model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def adopt(self, optimizer: Optimizer) -> None:
        """Do nothing: the model's parameters are what an optimizer steps."""

    def allocate_states(self, optimizer: Optimizer) -> None:
        """Do nothing: it is not known what an optimizer of whole parameters or DTensors allocates."""

    def showing_parameters(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return nullcontext()

    def announce_loss(self, loss: Tensor) -> None:
        """Do nothing: torch's engines wait for no loss."""

    def settle(self) -> None:
        """Do nothing: torch's engines leave no collective in flight after a step."""

    def replayed_calls(self) -> tuple[int, int]:
        return 0, 0

    def buckets(self) -> dict[str, tuple[str, ...]]:
        """Return nothing: torch's engines do not report their buckets."""
        return {}

    # Weights

    def edit(self) -> AbstractContextManager[None]:
        """Do nothing: each shard lies on one rank, and DDP's parameters are the optimizer's."""
        return nullcontext()

    def whole(self, *, write: bool = False) -> AbstractContextManager[None]:
        self._check("whole")
        return nullcontext()

    weight_stream = full_state.weight_stream
    full_state_dict = full_state.full_state_dict
    load_full_state_dict = full_state.load_full_state_dict

    # Gradients

    clip_grad_norm_ = full_state.clip_grad_norm_
    clip_grad_value_ = full_state.clip_grad_value_
    grad_norms = full_state.grad_norms
