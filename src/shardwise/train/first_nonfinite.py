"""The first NaN or Inf of a step: the step runs again with hooks on each module.

Only a step whose gradient norm is not finite pays for it. Its update was not applied, so the weights are those that
gave the NaN. Every rank runs its own passes again; the collectives are those of any step, so no rank waits alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.comm.agreement import exchange
from shardwise.comm.dtensor import local_part
from shardwise.train.randomness import random_states, restore_random_states

_MODEL = "the model (its output)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonFinite:
    """The first place in a step that was not finite, and the ranks that have it; None: it did not happen again."""

    step: int
    place: str | None
    ranks: tuple[int, ...] = ()


def find_first_nonfinite(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    batches: Sequence[Any],
    device: torch.device,
    run_again: Callable[[], Tensor],
) -> FirstNonFinite:
    """Find the place before the update of the step; all ranks get the same answer. Collective.

    model       as the user made it: its modules' names are the places
    run_again   runs the step's passes and returns their loss; only the gradients stay changed
    """
    sightings = _Sightings()
    if not all(_finite(batch) for batch in batches):
        sightings.places.append("the batch")
    elif not _finite([parameter for group in optimizer.param_groups for parameter in group["params"]]):
        sightings.places.append("the weights, before this step")
    with _restoring(model, device=device), _watching(model, sightings):
        loss = run_again()
    sightings.loss_is_finite = _finite(loss)
    places = exchange(sightings.first)
    first = next((place for place in places if place is not None), None)
    ranks = tuple(rank for rank, place in enumerate(places) if first is not None and place == first)
    return FirstNonFinite(step=step, place=first, ranks=ranks)


@dataclass(slots=True)
class _Sightings:
    """The values that were not finite on this rank, in order."""

    places: list[str] = field(default_factory=list)
    only_minus_inf: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    loss_is_finite: bool = True

    @property
    def first(self) -> str | None:
        # -Inf may be a mask, which is no fault unless the model returns it. Gradients follow from outputs.
        of_loss = self.only_minus_inf if _MODEL in self.only_minus_inf else ["the loss (the model's output is finite)"]
        return next(iter([*self.places, *([] if self.loss_is_finite else of_loss), *self.gradients]), None)

    def add_output(self, name: str, output: Any) -> None:
        if not _finite(output):
            masks = _finite(output, minus_inf=True)
            (self.only_minus_inf if masks else self.places).append(f"{name} (its output)" if name else _MODEL)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        if not _finite(gradient):
            self.gradients.append(f"the gradient of {name}")


@contextmanager
def _watching(model: nn.Module, sightings: _Sightings) -> Iterator[None]:
    """Look at every module's output, and at every gradient before it is reduced."""
    handles: list[Any] = []
    watched: set[int] = set()

    def watch_gradients(name: str, module: nn.Module, *_: Any) -> None:
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in watched:
                watched.add(id(parameter))
                look = partial(sightings.add_gradient, f"{name}.{own_name}" if name else own_name)
                handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]

    def look_at_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        sightings.add_output(name, output)

    try:
        for name, module in model.named_modules():
            # Parameters are looked up when a module is called: torch's fully_shard replaces them before.
            handles.append(module.register_forward_pre_hook(partial(watch_gradients, name)))
            handles.append(module.register_forward_hook(partial(look_at_output, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restoring(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Restore random numbers and buffers (running statistics) afterwards, so that training can continue."""
    states = random_states(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_random_states(states, device=device)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@torch.no_grad()
def _finite(values: Any, *, minus_inf: bool = False) -> bool:
    """Return whether all numbers are finite, or -Inf if that is allowed."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            # Only this rank's part: gathering the rest would wait for ranks that do not look.
            here = local_part(leaf)
            if bool((here.isnan() | here.isposinf() if minus_inf else ~here.isfinite()).any()):
                return False
    return True
