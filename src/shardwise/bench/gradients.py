"""The norm of each parameter's gradient, by its full name, whoever holds which part of it.

‖g‖² = Σ over the parts of Σ gᵢ², in float64: every part counts once, however many ranks hold a copy of it. So the
number does not depend on the engine, nor on how it cuts a gradient, by more than the rounding of the gradient itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.dtensor import dtensor_types, local_part
from shardwise.engine.protocol import find_engine

# What engines put between the names of modules.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_forward_module", "_original_module", "_orig_mod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the optimizer steps of a parameter here; `counts` on one of the ranks that hold the same."""

    name: str
    parameter: Tensor
    counts: bool


def parts_of(model: nn.Module, *, names: Iterable[str]) -> list[Part]:
    """This rank's parts of the parameters of these names. `model` is what an engine made of it."""
    engine = find_engine(model)
    if engine is not None:
        slices = [piece for piece in engine.held(model).slices if piece.name in names]
        return [Part(name=piece.name, parameter=piece.parameter, counts=piece.copy == 0) for piece in slices]
    # By its name: to import FSDP1 takes a second, and who runs it has done so.
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    named = {plain_name(name, known=names): parameter for name, parameter in model.named_parameters()}
    return [
        Part(name=name, parameter=named[name], counts=_is_first_copy(named[name], sharded=sharded)) for name in names
    ]


def tells_gradients(model: nn.Module) -> bool:
    """Whether an optimizer's step finds the gradients in its parameters: DeepSpeed steps parameters of its own."""
    return type(model).__name__ != "DeepSpeedEngine"


def plain_name(name: str, *, known: Iterable[str]) -> str:
    """The model's own name for a parameter: without what was put around modules, if the model has none such itself."""
    while name not in known:
        parts = name.split(".")
        inside = next((index for index, part in enumerate(parts) if part in _WRAPPERS), None)
        if inside is None:
            return name
        name = ".".join(parts[:inside] + parts[inside + 1 :])
    return name


def _is_first_copy(parameter: Tensor, *, sharded: bool) -> bool:
    """Whether no rank before this one holds the same elements. `sharded`: FSDP1 has cut plain tensors."""
    if isinstance(parameter, dtensor_types()):
        place = parameter.device_mesh.get_coordinate()
        assert place is not None
        return all(index == 0 for index, how in zip(place, parameter.placements, strict=True) if how.is_replicate())
    return sharded or dist.get_rank() == 0


class GradientNorms:
    """Of the parameters of these names, as an optimizer's step finds them: after clipping, if that comes first."""

    def __init__(self, parts: Sequence[Part], *, names: Sequence[str]) -> None:
        self._parts = parts
        self._names = names
        # Name → Σ gᵢ² of what counts here, where it was computed; None until a step has come by.
        self._squares: dict[str, Tensor] | None = None

    @contextmanager
    def seen_by(self, optimizer: Optimizer) -> Iterator[None]:
        """Look in the step in here. Nothing is communicated, nor waited for."""
        self._squares = None
        handle = optimizer.register_step_pre_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        grads = {part.name: part.parameter.grad for part in self._parts if part.counts}
        self._squares = {n: local_part(grad).double().square().sum() for n, grad in grads.items() if grad is not None}

    def norms(self, *, device: torch.device) -> dict[str, float]:
        """By name. Collective. Empty where the step was left out (fp16: a gradient that overflowed)."""
        if self._squares is None:
            return {}
        mine = [float(self._squares.get(name, 0.0)) for name in self._names]
        squares = torch.tensor(mine, dtype=torch.float64, device=device)
        dist.all_reduce(squares)
        return dict(zip(self._names, squares.sqrt().tolist(), strict=True))
