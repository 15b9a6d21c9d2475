"""Recomputation: a unit's activations are computed again in backward instead of being kept until then.

full       the unit's forward runs again, from its inputs
selective  like full, but outputs of matrix products and fused attention are kept (selective.py)

torch's non-reentrant checkpoint decides when, and restores the random numbers and autocast of the forward. In addition,
a recomputation here sees the unit's persistent buffers as its forward did, leaves the unit's modules unchanged
(BatchNorm counts a batch once), and refuses parameters that were updated in between.

A unit inside a recomputed unit is part of that one, and not recomputed a second time.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardwise.engine.activations.saved import Kept, SavedTensor
from shardwise.engine.activations.selective import Give, Keep, Products
from shardwise.engine.core.flat_buffers import unguarded

# A larger persistent buffer holds weights rather than statistics, and a copy per call would cost as much memory as
# recomputation saves.
_MOST_BUFFER_BYTES = 2**20

# The namespace of a buffer, its name there, its value.
_Buffers = list[tuple[dict[str, Tensor | None], str, Tensor]]


def recompute_unit(module: nn.Module, *, mode: str, pack: Callable[[Tensor], SavedTensor] = Kept) -> Callable[[], None]:
    """Have backward recompute what `module` computes in forward; `mode` is full or selective. Returns the undo.

    `pack` stores the tensors that selective keeps. Several wrappers of one module are undone in reverse order.
    """
    unit = RecomputedUnit(module, products=Products(pack=pack) if mode == "selective" else None)

    @functools.wraps(unit.forward)
    def forward(*inputs: Any, **options: Any) -> Any:
        if is_recomputed() or not torch.is_grad_enabled():
            return unit.forward(*inputs, **options)
        # Flat, so that torch sees every tensor, also in keywords and containers, as saved for backward.
        leaves, tree = tree_flatten((inputs, options))
        # Each once: a forward may ask whether two inputs are the same object, as attention does of query and key.
        distinct = {id(leaf): leaf for leaf in leaves}
        numbers = {key: number for number, key in enumerate(distinct)}
        call = _Call(unit, inputs, options, tree=tree, places=[numbers[id(leaf)] for leaf in leaves])
        return checkpoint(call, *distinct.values(), use_reentrant=False, preserve_rng_state=not draws_nothing())

    return replace_forward(module, forward)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give this one module another forward. Returns the undo."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def undo() -> None:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before

    return undo


class _Nesting(threading.local):
    """Per thread, because backward recomputes on other threads."""

    recomputed = False
    draws_nothing = False


_nesting = _Nesting()


@contextmanager
def without_random_numbers() -> Iterator[None]:
    """Do not save the random state: forwards in this block draw none, and during a capture it cannot be read."""
    _nesting.draws_nothing = True
    try:
        yield
    finally:
        _nesting.draws_nothing = False


def draws_nothing() -> bool:
    """Return whether forwards draw no random numbers, so that their state need not be saved."""
    return _nesting.draws_nothing


def is_recomputed() -> bool:
    """Return whether the current code is part of a recomputed unit, in its forward or in its recomputation."""
    return _nesting.recomputed


@contextmanager
def _one_recomputed_unit() -> Iterator[None]:
    outer, _nesting.recomputed = _nesting.recomputed, True
    try:
        yield
    finally:
        _nesting.recomputed = outer


class RecomputedUnit:
    """State shared by all calls of a unit: the module with its own forward, and its kept products."""

    def __init__(self, module: nn.Module, *, products: Products | None) -> None:
        self.module = module
        self.forward = module.forward
        self.products = products

    # At the first call: `prepare` may replace parameters.
    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        return list(self.module.modules())

    def versions(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self.parameters]

    def copy_buffers(self) -> _Buffers:
        """Copy the persistent buffers, which training may change."""
        return [
            (module._buffers, name, buffer.clone())
            for module in self.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
            and name not in module._non_persistent_buffers_set
            and buffer.nbytes <= _MOST_BUFFER_BYTES
        ]

    @contextmanager
    def without_trace(self, *, buffers: _Buffers) -> Iterator[None]:
        """Use copies of `buffers`, and drop attributes set on modules meanwhile, which may keep a graph alive."""
        places = [module.__dict__ for module in self.modules if not type(module).__module__.startswith("torch.nn.")]
        places += [module._buffers for module in self.modules if module._buffers]
        own = [(place, place.copy()) for place in places]
        for place, name, value in buffers:
            # Copies, because there may be another recomputation.
            place[name] = value.clone()
        try:
            yield
        finally:
            for now, before in own:
                if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                    now.clear()
                    now.update(before)


class _Call:
    """One call of a unit. torch calls it for the forward, and with the same inputs for each recomputation.

    tree, places   how the inputs are put together from the distinct objects that torch saves
    """

    def __init__(
        self, unit: RecomputedUnit, inputs: tuple[Any, ...], options: dict[str, Any], *, tree: Any, places: list[int]
    ) -> None:
        self.unit = unit
        self.tree = tree
        self.places = places
        # The forward gets the original objects: it may write into a list or dict that its caller reads.
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (inputs, options)
        self.versions = unit.versions()
        self.buffers = unit.copy_buffers()
        self.keep = Keep(unit.products) if unit.products is not None else None

    def __call__(self, *distinct: Any) -> Any:
        if self.given is None:
            inputs, options = tree_unflatten([distinct[place] for place in self.places], self.tree)
            return self._again(inputs, options)
        inputs, options = self.given
        self.given = None
        with _one_recomputed_unit(), self.keep or nullcontext():
            return self.unit.forward(*inputs, **options)

    def _again(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.versions != self.unit.versions():
            # torch has the same check for weights that it saves, but recomputation saves none.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {type(self.unit.module).__name__} changed between forward and the recomputation in "
                "backward; step the optimizer after backward"
            )
        give = Give(self.keep) if self.keep is not None else nullcontext()
        with _one_recomputed_unit(), self.unit.without_trace(buffers=self.buffers), give:
            self.unit.forward(*inputs, **options)
