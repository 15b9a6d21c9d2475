"""The engine protocol: the methods that every engine has. A prepared model carries its engine as an attribute.

Callers find the engine of a model (`require_engine`, `find_engine`) and call it; none of them needs to know which
engine it is. A method that an engine cannot offer raises the sentence of its row in plan/limits.py.

HeldState        the state that a rank holds: checkpoints and the profiler read it, also of models without an engine
TrainingEngine   HeldState, and the methods that training calls
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.owned_model import OwnedModel
from shardwise.errors import InvalidModel
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS

Batch = TypeVar("Batch")
Tell = Callable[[str], None]


class HeldState(ABC):
    """Reads the state that a rank holds of a model, by full names."""

    @abstractmethod
    def plan_of(self, model: nn.Module) -> Plan | None:
        """Return the plan that the model runs; None without an engine."""

    @abstractmethod
    def bare(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, without a wrapper."""

    @abstractmethod
    def held(self, model: nn.Module) -> OwnedModel:
        """Return this rank's slices and the buffers, after all communication into them has ended."""

    @abstractmethod
    def slices_filled(self, model: nn.Module) -> None:
        """Distribute values that were written into the slices of `held`. Collective."""

    @abstractmethod
    def group_names(self, model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
        """Return the full names of each param group, including those that this rank holds nothing of."""

    @abstractmethod
    def check_values(self, model: nn.Module, *, what: str) -> None:
        """Raise if the model temporarily has other values than its trained ones (`ema.applied()`)."""

    @abstractmethod
    def held_tensors(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (category, tensor) for all known memory of the model and its optimizer."""

    @abstractmethod
    def listen_to_writes(self, model: nn.Module, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        """Call `hear` from now on before the state is written. A second time, and under a new plan, it counts once."""


class TrainingEngine(HeldState):
    """Trains a prepared model. The public functions of engines.py document the methods of the same name."""

    # Calls

    @abstractmethod
    def plan_of(self, model: nn.Module) -> Plan:
        """Return the plan that the model runs."""

    def can(self, function: str, model: nn.Module) -> bool:
        """Return whether this engine has a function under the model's plan."""
        plan = self.plan_of(model)
        return LIMITS[plan.engine].why_not_call(function, plan) is None

    def check(self, function: str, model: nn.Module) -> None:
        """Raise InvalidPlan for a function that this engine does not have."""
        plan = self.plan_of(model)
        LIMITS[plan.engine].check_call(function, plan)

    # Plans and steps

    @abstractmethod
    def replan(self, model: nn.Module, plan: Plan) -> None: ...

    @abstractmethod
    def fixed_by(self, model: nn.Module, plan: Plan) -> str:
        """Return the trait of the model that keeps it under the plan it has; "" if `replan` may change the plan."""

    @abstractmethod
    def accumulate(self, model: nn.Module, *, enabled: bool = True) -> AbstractContextManager[None]: ...

    @abstractmethod
    def mean_count(self, model: nn.Module, count: float) -> float: ...

    @abstractmethod
    def join(self, model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]: ...

    @abstractmethod
    def concerns(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model."""

    @abstractmethod
    def adopt(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make an optimizer that was created after `prepare` step what this rank owns. Collective."""

    def allocate_states(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Allocate the state that the first update of an adopted optimizer would allocate, where it is known."""

    @abstractmethod
    def showing_parameters(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Show the model's own parameters in an optimizer's param groups, which may be changed in the block."""

    @abstractmethod
    def announce_loss(self, model: nn.Module, loss: Tensor) -> None:
        """Let the next backward begin at a loss that has parameters which the model's forward does not use."""

    @abstractmethod
    def settle(self, model: nn.Module) -> None:
        """Wait for the collectives that a step has left in flight."""

    def replayed_calls(self, model: nn.Module) -> tuple[int, int]:
        """Return how many calls of units there were so far, and how many of them were replays of graphs."""
        return 0, 0

    @abstractmethod
    def omit_memory_advice(self, model: nn.Module) -> None:
        """Leave predictions out of an out-of-memory error: the caller adds better ones."""

    # Weights

    @abstractmethod
    def edit(self, model: nn.Module) -> AbstractContextManager[None]: ...

    @abstractmethod
    def whole(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]: ...

    @abstractmethod
    def weight_stream(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def full_state_dict(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
    ) -> dict[str, Any]: ...

    @abstractmethod
    def load_full_state_dict(
        self, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
    ) -> None: ...

    # Gradients

    @abstractmethod
    def clip_grad_norm_(
        self,
        model: nn.Module,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor: ...

    @abstractmethod
    def clip_grad_value_(
        self, model: nn.Module, clip_value: float, *, parameters: Iterable[Tensor] | None = None
    ) -> None: ...

    @abstractmethod
    def grad_norms(self, model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]: ...

    @abstractmethod
    def buckets(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the units of each bucket by the bucket's name; empty if the engine does not report its buckets."""


# An attribute of the model, because a table of engines by model would keep the models alive.
_ATTRIBUTE = "_shardwise_training_engine"


def carry_engine(model: nn.Module, engine: TrainingEngine) -> None:
    """Make `engine` the engine of a model that it has prepared."""
    model.__dict__[_ATTRIBUTE] = engine


def drop_engine(model: nn.Module) -> TrainingEngine | None:
    """Take the engine off a model, and return it."""
    engine: TrainingEngine | None = model.__dict__.pop(_ATTRIBUTE, None)
    return engine


def find_engine(model: nn.Module) -> TrainingEngine | None:
    """Return the engine of a model; None for one that was not prepared."""
    engine: TrainingEngine | None = model.__dict__.get(_ATTRIBUTE)
    return engine


def require_engine(model: nn.Module) -> TrainingEngine:
    """Return the engine of a model; raise InvalidModel for one that was not prepared."""
    engine = find_engine(model)
    if engine is None:
        raise InvalidModel(f"this {type(model).__name__} has not been through shardwise.prepare")
    return engine
