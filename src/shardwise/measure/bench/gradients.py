"""Computes the norm of each parameter's gradient, however the engine shards it.

‖g‖² = Σ over the parts of Σ gᵢ², in float64. Every part counts once, however many ranks hold a copy, so engines differ
only by the rounding of the gradient itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.groups.dtensor import dtensor_types, local_part
from shardwise.engines import find_engine

# Names that engines insert between the names of modules.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_forward_module", "_original_module", "_orig_mod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's part of a parameter; `counts` is True on one of the ranks that hold the same part."""

    name: str
    parameter: Tensor
    counts: bool


def parts_of(model: nn.Module, *, names: Iterable[str]) -> list[Part]:
    """Return this rank's parts of the named parameters of a model that an engine has prepared."""
    engine = find_engine(model)
    if engine is not None:
        slices = [piece for piece in engine.held().slices if piece.name in names]
        return [Part(name=piece.name, parameter=piece.parameter, counts=piece.copy == 0) for piece in slices]
    # By its name, since importing FSDP1 takes a second.
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    named = {plain_name(name, known=names): parameter for name, parameter in model.named_parameters()}
    return [
        Part(name=name, parameter=named[name], counts=_is_first_copy(named[name], sharded=sharded)) for name in names
    ]


def shows_gradients(model: nn.Module) -> bool:
    """Return whether the optimizer's parameters hold the gradients. DeepSpeed steps its own parameters."""
    return type(model).__name__ != "DeepSpeedEngine"


def plain_name(name: str, *, known: Iterable[str]) -> str:
    """Return the model's own name for a parameter, without the names of wrappers."""
    while name not in known:
        parts = name.split(".")
        inside = next((index for index, part in enumerate(parts) if part in _WRAPPERS), None)
        if inside is None:
            return name
        name = ".".join(parts[:inside] + parts[inside + 1 :])
    return name


def _is_first_copy(parameter: Tensor, *, sharded: bool) -> bool:
    """Return whether no earlier rank holds the same elements. `sharded`: FSDP1 has sharded plain tensors."""
    if isinstance(parameter, dtensor_types()):
        place = parameter.device_mesh.get_coordinate()
        assert place is not None
        return all(index == 0 for index, how in zip(place, parameter.placements, strict=True) if how.is_replicate())
    return sharded or dist.get_rank() == 0


class GradientNorms:
    """The gradient norms of the named parameters, as an optimizer's step finds them: after clipping, if any."""

    def __init__(self, parts: Sequence[Part], *, names: Sequence[str]) -> None:
        self._parts = parts
        self._names = names
        # Name → Σ gᵢ² of the parts that count here, on the device; None until the optimizer steps.
        self._squares: dict[str, Tensor] | None = None

    @contextmanager
    def seen_by(self, optimizer: Optimizer) -> Iterator[None]:
        """Read the gradients in the block's step, without communicating or waiting."""
        self._squares = None
        handle = optimizer.register_step_pre_hook(self._read)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _read(self, *_: Any) -> None:
        grads = {part.name: part.parameter.grad for part in self._parts if part.counts}
        self._squares = {n: local_part(grad).double().square().sum() for n, grad in grads.items() if grad is not None}

    def norms(self, *, device: torch.device) -> dict[str, float]:
        """Return name → norm. Collective. Empty if the step was skipped (fp16: a gradient overflowed)."""
        if self._squares is None:
            return {}
        mine = [float(self._squares.get(name, 0.0)) for name in self._names]
        squares = torch.tensor(mine, dtype=torch.float64, device=device)
        dist.all_reduce(squares)
        return dict(zip(self._names, squares.sqrt().tolist(), strict=True))
