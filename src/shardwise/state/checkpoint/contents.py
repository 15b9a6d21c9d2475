"""A model and an optimizer, sharded in any way → the contents of a checkpoint; and back, sharded in any other way."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError
from shardwise.comm.groups.dtensor import local_part
from shardwise.engine.owned_model import OwnedModel, OwnedSlice
from shardwise.engine.torch_engine.plain_model import state_of
from shardwise.state.checkpoint.boxes import Boxes, share
from shardwise.state.checkpoint.holding import holding
from shardwise.state.checkpoint.late_numbers import LateNumbers
from shardwise.state.checkpoint.manifest import EMA_OF, MODEL, OWN, Contents, Manifest
from shardwise.state.checkpoint.optimizer_state import OptimizerLoad, describe_optimizer
from shardwise.state.checkpoint.ranks import Ranks
from shardwise.state.checkpoint.staging import Staging
from shardwise.state.checkpoint.typed import dtype_name, from_json, to_json

if TYPE_CHECKING:
    # Models import this package, and need no engine.
    from shardwise.engine.prepared.average import EMA

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """Some elements of a tensor of this shape, from `start` on, in one dimension.

    elsewhere   a rank outside of those that share the writing holds them, too
    """

    name: str
    shape: tuple[int, ...]
    start: int
    elements: Tensor
    elsewhere: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "StatePiece":
        return cls(name=name, shape=tuple(tensor.shape), start=0, elements=tensor.detach().reshape(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """The part of a checkpoint that one rank writes. The pieces of all ranks hold every tensor once."""

    contents: Contents
    pieces: list[StatePiece]
    # The first parameter in which this rank has a NaN or Inf.
    nonfinite: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.elements.numel() * piece.elements.element_size() for piece in self.pieces)

    def copied(self, staging: Staging) -> "StateSnapshot":
        """Return a copy that training does not change any more."""
        copies = staging.copy([piece.elements for piece in self.pieces])
        pieces = [replace(piece, elements=copy) for piece, copy in zip(self.pieces, copies, strict=True)]
        return replace(self, pieces=pieces)


def snapshot(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    step: int,
    progress: Mapping[str, Any],
    own: Mapping[str, Any],
    ranks: Ranks,
    ema: "EMA | None" = None,
    sharers: Collection[int] | None = None,
    check_finite: bool = True,
    late: LateNumbers | None = None,
) -> StateSnapshot:
    """Return this rank's part of a checkpoint, in the memory that is trained.

    sharers        of the ranks that hold equal elements, those that write them once (default: all)
    check_finite   look for NaN and Inf, which reads all parameters and waits for the device
    late           collects the optimizer's numbers on a GPU, which are otherwise read now, which waits for the device
    """
    state = state_of(model)
    if optimizer is not None or ema is not None:
        # Weights alone may be saved with the values that they have at the moment.
        state.check_values(what="a checkpoint of a training")
    # First: it makes the engine adopt a new optimizer.
    groups = state.group_names(optimizer) if optimizer is not None else []
    held = holding(model)
    written = partial(_written, sharers=sharers)
    pieces = [written(MODEL + part.name, part, part.parameter) for part in held.slices]
    nonfinite = _first_nonfinite(pieces) if check_finite else None
    described = None
    if optimizer is not None:
        write = to_json if late is None else late.to_json
        described, states = describe_optimizer(optimizer, slices=held.stepped, groups=groups, to_json=write)
        pieces += [written(one.name, one.of, one.value) for one in states]
    if ema is not None:
        pieces += [written(EMA_OF + part.name, part, average) for part, average in _averaged(held, ema)]
    pieces = [piece for piece in pieces if piece.elements.numel()]
    if ranks.index == 0:
        # Every step broadcasts the buffers of rank 0, so these are saved.
        pieces += [StatePiece.whole(MODEL + name, buffer) for name, buffer in held.buffers.items()]
        pieces += _empty(held)
    mine = {key: value for key, value in own.items() if isinstance(value, Tensor)}
    pieces += [StatePiece.whole(f"{OWN}{ranks.index}.{key}", value) for key, value in mine.items()]
    plan = state.plan
    average = None
    if ema is not None:
        average = {"decay": ema.decay, "num_updates": ema.num_updates, "parameters": ema.names()}
    contents = Contents(
        step=step,
        plan=None if plan is None else plan.to_dict(),
        parameters={name: [list(shape), dtype_name(dtype)] for name, (shape, dtype) in held.parameters.items()},
        buffers={name: [list(value.shape), dtype_name(value.dtype)] for name, value in held.buffers.items()},
        aliases=held.aliases,
        optimizer=described,
        ema=average,
        progress=to_json(dict(progress), what="progress"),
        own=[to_json({key: value for key, value in own.items() if key not in mine}, what="own")],
        finite=nonfinite is None,
    )
    return StateSnapshot(contents=contents, pieces=pieces, nonfinite=nonfinite)


def _averaged(held: OwnedModel, ema: "EMA") -> list[tuple[OwnedSlice, Tensor]]:
    """Return the slices that have an average, with it."""
    averages = ema.slices()
    return [(part, averages[part.parameter]) for part in held.slices if part.parameter in averages]


def _first_nonfinite(pieces: Sequence[StatePiece]) -> str | None:
    """Return the name of the first piece whose largest magnitude is NaN or Inf. Waits for the device once."""
    floats = [piece for piece in pieces if piece.elements.numel() and piece.elements.dtype in _FLOATS]
    if not floats:
        return None
    norms = torch._foreach_norm([piece.elements for piece in floats], math.inf)
    finite = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).isfinite().tolist()
    return next((piece.name.removeprefix(MODEL) for piece, good in zip(floats, finite, strict=True) if not good), None)


def _written(name: str, part: OwnedSlice, tensor: Tensor, *, sharers: Collection[int] | None) -> StatePiece:
    """Return the part of a slice that this rank writes, of the ranks that hold it."""
    mine = part.holders[part.copy]
    near = part.holders if sharers is None else tuple(rank for rank in part.holders if rank in sharers)
    start, stop = share(start=part.start, stop=part.stop, copy=near.index(mine), num_copies=len(near))
    elements = local_part(tensor).detach().reshape(-1)[start - part.start : stop - part.start]
    elsewhere = len(near) < len(part.holders)
    return StatePiece(name=name, shape=part.shape, start=start, elements=elements, elsewhere=elsewhere)


def _empty(held: OwnedModel) -> list[StatePiece]:
    """Return the parameters without elements, of which no rank holds a slice."""
    return [
        StatePiece.whole(MODEL + name, torch.empty(shape, dtype=dtype))
        for name, (shape, dtype) in held.parameters.items()
        if not prod(shape)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A prepared load: the caller fills `targets` from the checkpoint, then calls `finish`.

    has_optimizer   whether the checkpoint holds a state for the optimizer
    """

    targets: dict[str, Any]
    own: dict[str, Any] | None
    has_optimizer: bool
    finish: Callable[[], None]

    @property
    def wanted(self) -> dict[str, tuple[int, int]]:
        """Target → its first and last element, of the flattened tensor."""
        starts = {name: one.start if isinstance(one, Boxes) else 0 for name, one in self.targets.items()}
        counts = {name: (one.elements if isinstance(one, Boxes) else one).numel() for name, one in self.targets.items()}
        return {name: (start, start + counts[name]) for name, start in starts.items()}


@torch.no_grad()
def loading(
    model: nn.Module, optimizer: Optimizer | None, *, manifest: Manifest, ranks: Ranks, ema: "EMA | None" = None
) -> Loading:
    """Describe what this rank reads from a checkpoint; only `finish` changes the model and the optimizer."""
    state = state_of(model)
    state.check_values(what="a load of a checkpoint")
    # First: it makes the engine adopt a new optimizer.
    groups = state.group_names(optimizer) if optimizer is not None else []
    held = holding(model)
    check_fits(manifest, held)
    windows: list[_Window] = [_Window(MODEL + part.name, part, part.parameter) for part in held.slices]
    states: OptimizerLoad | None = None
    if optimizer is not None and manifest.contents.optimizer is not None:
        states = OptimizerLoad(optimizer, manifest.contents.optimizer, slices=held.stepped, groups=groups)
        windows += [_Window(one.name, one.of, one.value) for one in states.tensors]
    if ema is not None:
        _check_ema(manifest, ema)
        windows += [_Window(EMA_OF + part.name, part, average) for part, average in _averaged(held, ema)]
    targets: dict[str, Any] = {window.name: window.boxes for window in windows if window.num_elements}
    targets |= {MODEL + name: buffer for name, buffer in held.buffers.items() if buffer.numel()}
    own, own_tensors = _own(manifest, ranks=ranks)
    targets |= own_tensors

    def finish() -> None:
        for window in windows:
            window.close()
        if optimizer is not None:
            optimizer.state.clear()
        if states is not None:
            states.take()
        if ema is not None and manifest.contents.ema is not None:
            ema.decay, ema.num_updates = manifest.contents.ema["decay"], manifest.contents.ema["num_updates"]
        state.slices_filled()

    return Loading(targets=targets, own=own, has_optimizer=states is not None, finish=finish)


def _check_ema(manifest: Manifest, ema: "EMA") -> None:
    """Raise unless the checkpoint holds the average of the same parameters."""
    if manifest.contents.ema is None:
        raise CheckpointError(
            "the checkpoint holds no EMA: load it without, and make a new shardwise.EMA(model, decay) after that"
        )
    different = set(manifest.contents.ema["parameters"]) ^ set(ema.names())
    if different:
        name = min(different)
        where = "the checkpoint" if name in manifest.contents.ema["parameters"] else "this EMA"
        raise CheckpointError(f"{name} has an average only in {where}: freeze the same parameters before EMA is made")


class _Window:
    """A rank's slice as boxes to write into: its own memory, or a copy if that is not contiguous."""

    def __init__(self, name: str, part: OwnedSlice, tensor: Tensor) -> None:
        self.name = name
        self._tensor = local_part(tensor).detach()
        self._elements = self._tensor.reshape(-1)
        self.num_elements = part.stop - part.start
        self.boxes = Boxes(self._elements[: self.num_elements], shape=part.shape, start=part.start)

    def close(self) -> None:
        """Copy the filled boxes into the slice; the elements after them are padding (holding.py)."""
        self._elements[self.num_elements :] = 0
        if self._elements.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._elements.view(self._tensor.shape))


def _own(manifest: Manifest, *, ranks: Ranks) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return what this rank saved for itself, if the number of ranks is the same, and its tensors, not filled yet."""
    if manifest.contents.num_ranks != ranks.count or not manifest.contents.own:
        return None, {}
    prefix = f"{OWN}{ranks.index}."
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in manifest.tensors.items()
        if name.startswith(prefix)
    }
    own = from_json(manifest.contents.own[ranks.index])
    return own | {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, tensors


def check_fits(manifest: Manifest, held: OwnedModel) -> None:
    """Raise unless the model has exactly the checkpoint's tensors, in their shapes.

    A parameter that is tied in the checkpoint but not in the model is found by its other name.
    """
    problem = "the checkpoint does not fit the model: "
    stored = {**manifest.contents.parameters, **manifest.contents.buffers}
    shapes = {name: shape for name, (shape, _) in held.parameters.items()}
    shapes |= {name: tuple(value.shape) for name, value in held.buffers.items()}
    for name, shape in shapes.items():
        first = manifest.contents.aliases.get(name, name)
        if first not in stored:
            raise CheckpointError(f"{problem}it has no {name}, of shape {shape}")
        if tuple(stored[first][0]) != shape:
            raise CheckpointError(
                f"{problem}{name} has shape {tuple(stored[first][0])} in the checkpoint, {shape} in the model"
            )
    for name, (shape, _) in stored.items():
        if name not in shapes:
            raise CheckpointError(f"{problem}it has {name}, of shape {tuple(shape)}, and the model has not")
