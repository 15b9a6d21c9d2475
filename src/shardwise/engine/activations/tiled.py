"""Modules that compute in tiles along the sequence: a long sequence needs the activations of one tile.

forward    tile by tile, without a graph; only the module's input is kept
backward   computes each tile's forward again, then its backward; gradients of parameters are added up in the reduce
           dtype, and rounded once

Such a module acts on each token by itself, as an MLP, a norm or a projection does. The first call verifies that. The
head of a language model is tiled together with the loss that follows it (tiled_logits.py).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.base.vocabulary.heads import HEADS
from shardwise.engine.activations.recompute import draws_nothing, replace_forward
from shardwise.engine.activations.selective import keeping_no_products
from shardwise.engine.activations.tiled_logits import TiledLogits
from shardwise.plan.patterns import Patterns, unmatched

TokenFunction = Callable[..., Tensor]
"""Of one tensor (…, tokens, features) or several, to a tensor of the same tokens."""

# Tokens with which the first call compares a tile, and the difference that it allows: kernels round by shape.
_CHECKED_TOKENS = 32
_MOST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def tile_modules(
    model: nn.Module,
    *,
    tile: Mapping[str, int],
    units: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    verifies: bool = True,
) -> list[Callable[[], None]]:
    """Let the modules that `tile` matches compute in tiles of so many tokens; return the functions that undo it.

    units      names of the units; a head in one of them is freed when the loss is computed, so it returns all logits
    dtype      in which gradients are added up
    verifies   refuse a module that mixes tokens; fake tensors cannot tell
    """
    undo = []
    for name, tokens in _tiled_names(model, tile=tile):
        module = model.get_submodule(name)
        kind = TiledHead if _is_head(module, name=name) and not _is_in_unit(name, units=units) else TiledModule
        tiled = kind(module, name=name, tokens=tokens, dtype=dtype, verifies=verifies)
        # Compiled code would have to contain the loop over the tiles.
        undo.append(replace_forward(module, disable_dynamo(functools.wraps(module.forward)(tiled))))
    return undo


def check_tiles(model: nn.Module, *, tile: Mapping[str, int], units: Iterable[str]) -> None:
    """Refuse patterns that name nothing, and modules that contain a unit."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in unmatched(tile, names):
        raise InvalidPlan(f"tile.{pattern} matches no module of the model")
    for name, _ in _tiled_names(model, tile=tile):
        inner = next((unit for unit in units if unit.startswith(f"{name}.")), None)
        if inner is not None:
            raise InvalidPlan(f"tile: {name} contains the unit {inner}; tile modules inside of units, such as MLPs")


def _tiled_names(model: nn.Module, *, tile: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the names of the modules that compute in tiles, and the size of their tiles."""
    patterns = Patterns(tile)
    found = [(name, patterns.find(name, default=0)) for name, _ in model.named_modules() if name]
    return [(name, tokens) for name, tokens in found if tokens]


def _is_head(module: nn.Module, *, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] in HEADS


def _is_in_unit(name: str, *, units: Iterable[str]) -> bool:
    """Return whether a module is a unit or a part of one, other than the model itself."""
    return any(f"{name}.".startswith(f"{unit}.") for unit in units)


class TiledModule:
    """One module, its own forward, and the size of its tiles."""

    def __init__(self, module: nn.Module, *, name: str, tokens: int, dtype: torch.dtype, verifies: bool) -> None:
        self.module = module
        self.name = name
        self.tokens = tokens
        self.dtype = dtype
        self.inner: Callable[[Tensor], Tensor] = module.forward
        self._is_verified = not verifies

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        x = self._only_input(inputs, options)
        if x.shape[-2] <= self.tokens:
            return self.inner(x)
        if not self._is_verified:
            self._verify(x)
        return self.computed(x, self.inner)

    def computed(self, x: Tensor, function: TokenFunction, *others: Tensor) -> Tensor:
        """Return a function of x and of other tensors with the same tokens, tile by tile.

        The function uses the parameters of the module. Gradients flow into them and into x.
        """
        params = [param for param in self.module.parameters() if param.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or params):
            return self.joined(self.each(function, x, *others), num_tokens=x.shape[-2])
        found: Tensor = _Tiled.apply(self, function, others, x, *params)  # type: ignore[no-untyped-call]
        return found

    def each(self, function: TokenFunction, *tensors: Tensor) -> Iterator[Tensor]:
        return (function(*parts) for parts in zip(*map(self.parts, tensors), strict=True))

    def _only_input(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        given = [*inputs, *options.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
            raise InvalidModel(f"tile: {self.name} must be called with one tensor (…, tokens, features)")
        return given[0]

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield from torch.split(x, self.tokens, dim=-2)

    def joined(self, parts: Iterable[Tensor], *, num_tokens: int) -> Tensor:
        """Return the parts as one tensor; each is dropped before the next is computed."""
        whole: Tensor | None = None
        for number, part in enumerate(parts):
            if whole is None:
                whole = part.new_empty((*part.shape[:-2], num_tokens, part.shape[-1]))
            whole[..., number * self.tokens : (number + 1) * self.tokens, :] = part
        assert whole is not None
        return whole

    @torch.no_grad()
    def _verify(self, x: Tensor) -> None:
        """Refuse a module whose result for some tokens depends on others, or has another form."""
        was_training = self.module.training
        # Without random numbers and statistics of a batch.
        self.module.eval()
        try:
            start = min(_CHECKED_TOKENS, x.shape[-2] // 2)
            with keeping_no_products():
                both = self.inner(x[..., : 2 * start, :])
                alone = self.inner(x[..., start : 2 * start, :])
        finally:
            self.module.train(was_training)
        shaped = isinstance(both, Tensor) and both.shape[:-1] == x[..., : 2 * start, :].shape[:-1]
        if not shaped:
            raise InvalidModel(f"tile: {self.name} does not return one tensor (…, tokens, features)")
        together = both[..., start:, :]
        scale = together.abs().amax().clamp_min(1e-6)
        most = _MOST_DIFFERENCE.get(together.dtype, 1e-3)
        if bool(((together - alone).abs().amax() > most * scale).item()):
            raise InvalidModel(
                f"tile: {self.name} mixes tokens: its result for some of them depends on the others; tile modules that "
                "act on each token by itself, such as MLPs"
            )
        self._is_verified = True


class TiledHead(TiledModule):
    """A head whose logits are computed in tiles by what uses them."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        x = self._only_input(inputs, options)
        if x.shape[-2] <= self.tokens or not torch.is_grad_enabled():
            return super().__call__(x)
        return TiledLogits(x, self)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiled: TiledModule,
        function: TokenFunction,
        others: tuple[Tensor, ...],
        x: Tensor,
        *params: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tiled, ctx.function, ctx.others = tiled, function, others
        ctx.random = None if draws_nothing() else _RandomStates(x)
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x, *params)
        with keeping_no_products():
            return tiled.joined(tiled.each(function, x, *others), num_tokens=x.shape[-2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        x, *params = ctx.saved_tensors
        tiled, needs_x = ctx.tiled, ctx.needs_input_grad[3]
        enabled, dtype = ctx.autocast
        sums: list[Tensor | None] = [None] * len(params)
        grad_of_x = torch.empty_like(x) if needs_x else None
        with (
            ctx.random.restored() if ctx.random is not None else nullcontext(),
            torch.autocast(x.device.type, dtype=dtype, enabled=enabled),
        ):
            targets = [] if grad_of_x is None else list(tiled.parts(grad_of_x))
            parts = zip(*map(tiled.parts, (grads[0], x, *ctx.others)), strict=True)
            for number, (grad, part, *others) in enumerate(parts):
                with torch.enable_grad():
                    entry = part.detach().requires_grad_(needs_x)
                    result = ctx.function(entry, *others)
                leaves = [*([entry] if needs_x else []), *params]
                found = torch.autograd.grad(result, leaves, grad, allow_unused=True)
                if needs_x:
                    targets[number].copy_(found[0])
                _add(sums, found[int(needs_x) :], dtype=tiled.dtype)
        if not torch_private.keeps_graph():
            # As autograd frees what it has saved; this node lives as long as the loss.
            ctx.random = None
        own = [None if total is None else total.to(param.dtype) for total, param in zip(sums, params, strict=True)]
        return None, None, None, grad_of_x, *own


def _add(sums: list[Tensor | None], grads: Sequence[Tensor | None], *, dtype: torch.dtype) -> None:
    """Add gradients of one tile to those of others, in a dtype that is wide enough."""
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        total = sums[index]
        if total is None:
            sums[index] = grad.to(torch.promote_types(grad.dtype, dtype))
        else:
            total.add_(grad)


class _RandomStates:
    """The random states with which a forward began."""

    def __init__(self, x: Tensor) -> None:
        self._devices, self._device_states = get_device_states(x)
        self._host = torch.get_rng_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same numbers again inside the block."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._host)
            set_device_states(self._devices, self._device_states)
            yield
