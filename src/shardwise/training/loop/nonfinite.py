"""train.nonfinite: what follows on a NaN or Inf in a step, and the module that it comes from.

    stop   the run ends before a checkpoint is written (default)
    skip   the optimizer leaves the step out, and a warning says so
    warn   a warning says so

Once they are read, the loss and the gradient norm are the same on every rank, so all ranks decide alike. To find the
source, a step whose gradient norm is not finite runs again with hooks on each module. Its update was not applied, so
the weights are those that gave the NaN. Every rank runs its own passes again, so no rank waits alone.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.base.errors import ShardwiseError
from shardwise.comm.groups.agreement import exchange
from shardwise.comm.groups.dtensor import local_part
from shardwise.training.loop.metrics import StepMetrics
from shardwise.training.loop.restored import restoring

_MODEL = "the model (its output)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonFinite:
    """The first place in a step that was not finite, and the ranks that have it; None: it did not happen again."""

    step: int
    place: str | None
    ranks: tuple[int, ...] = ()


class NonFinite(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A loss or gradient norm that is NaN or Inf."""


def check_finite(
    steps: Sequence[StepMetrics],
    *,
    ranks_of: Callable[[int], Sequence[int]],
    found: FirstNonFinite | None,
    policy: str,
    scaled: bool,
    warns: bool,
) -> None:
    """Raise NonFinite, or warn on the rank that `warns`, at the first of `steps` that is not finite.

    ranks_of   step → the ranks whose own loss was not finite; collective, called only if there is such a step
    found      the source of the first such step, if it was looked for (`find_first_nonfinite`)
    scaled     with fp16 the scaler finds its scale by gradients that overflow: only the loss counts
    """
    bad = [step for step in steps if not _is_finite(step, scaled=scaled)]
    if not bad:
        return
    first = bad[0]
    ranks = tuple(ranks_of(first.step))
    where = f" on {_ranks(ranks)}" if ranks else ", with a finite loss on every rank"
    norm = "" if first.grad_norm is None else f", gradient norm {first.grad_norm:.4g}"
    source = _source(found if found is not None and found.step == first.step else None, ranks=ranks, scaled=scaled)
    what = f"step {first.step}: loss {first.loss:.4g}{norm}{where}, {source}"
    if policy == "stop":
        raise NonFinite(
            f"{what}; nothing was saved since: lower optimizer.lr or check the data, "
            "or set train.nonfinite to skip or warn"
        )
    if warns:
        skipped = [step for step in bad if step.grad_norm is not None and not math.isfinite(step.grad_norm)]
        did = f"; {len(skipped)} of {len(steps)} steps were skipped" if policy == "skip" and skipped else ""
        warnings.warn(f"NaN or Inf in {what}{did}", stacklevel=2)


def _source(found: FirstNonFinite | None, *, ranks: tuple[int, ...], scaled: bool) -> str:
    if found is None:
        # On a GPU a step is read after its update, when every weight may be NaN.
        return "in a module that is not known" + ("" if scaled else " (train.nonfinite = skip looks for it)")
    if found.place is None:
        return "but not when the step was run again"
    return f"first in {found.place}" + (f" on {_ranks(found.ranks)}" if found.ranks != ranks else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _is_finite(step: StepMetrics, *, scaled: bool) -> bool:
    norm = 0.0 if step.grad_norm is None or scaled else step.grad_norm
    return math.isfinite(step.loss) and math.isfinite(norm)


def find_first_nonfinite(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    batches: Sequence[Any],
    device: torch.device,
    run_again: Callable[[], Any],
) -> FirstNonFinite:
    """Find the place before the update of the step; all ranks get the same answer. Collective.

    model       as the user made it: its modules' names are the places
    run_again   runs the step's passes and returns their losses; only the gradients stay changed
    """
    sightings = _Sightings()
    if not all(_finite(batch) for batch in batches):
        sightings.places.append("the batch")
    elif not _finite([parameter for group in optimizer.param_groups for parameter in group["params"]]):
        sightings.places.append("the weights, before this step")
    with restoring(model, device=device), _watching(model, sightings):
        losses = run_again()
    sightings.loss_is_finite = _finite(losses)
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
