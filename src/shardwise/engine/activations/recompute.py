"""Recomputation: a unit's activations are computed again in backward instead of being kept until then.

full       the unit's forward runs again, from its inputs
selective  like full, but outputs of matrix products and fused attention are kept (selective.py)

torch's non-reentrant checkpoint decides when, and restores the random numbers and autocast of the forward. In addition,
a recomputation here sees the unit's state as its forward did, leaves it unchanged (BatchNorm counts a batch once), and
refuses parameters that were updated in between.

A unit inside a recomputed unit, or inside of the user's own checkpoint, is part of that, and not recomputed a second
time.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals import torch_private
from shardwise.engine.activations.saved import Kept, SavedTensor
from shardwise.engine.activations.selective import Give, Keep, Products
from shardwise.engine.activations.unit_state import UnitState
from shardwise.engine.core.parameters import unguarded


def recompute_unit(module: nn.Module, *, mode: str, pack: Callable[[Tensor], SavedTensor] = Kept) -> Callable[[], None]:
    """Have backward recompute what `module` computes in forward; `mode` is full or selective. Returns the undo.

    `pack` stores the tensors that selective keeps. Several wrappers of one module are undone in reverse order.
    """
    unit = RecomputedUnit(module, products=Products(pack=pack) if mode == "selective" else None)

    @functools.wraps(unit.forward)
    def forward(*inputs: Any, **options: Any) -> Any:
        if is_recomputed() or not torch.is_grad_enabled() or checkpoint_of(saved_hooks()) is not None:
            return unit.forward(*inputs, **options)
        # Flat, so that torch sees every tensor, also in keywords and containers, as saved for backward.
        leaves, tree = tree_flatten((inputs, options))
        # Each once: a forward may ask whether two inputs are the same object, as attention does of query and key.
        distinct = {id(leaf): leaf for leaf in leaves}
        numbers = {key: number for number, key in enumerate(distinct)}
        call = _UnitCall(unit, inputs, options, tree=tree, places=[numbers[id(leaf)] for leaf in leaves])
        return checkpoint(call, *distinct.values(), use_reentrant=False, preserve_rng_state=not draws_nothing())

    return replace_forward(module, forward)


def recompute_graph(
    function: Callable[..., Any],
    *inputs: Any,
    written: AbstractSet[int],
    products: Products | None,
    writes_again: bool = False,
) -> Any:
    """Call a function of explicit inputs, and have backward recompute what it computes.

    `written`: the numbers of the inputs that it writes, as buffers; a recomputation writes into copies. With
    `writes_again` it writes into them again, as one by torch.utils.checkpoint does.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    call = _GraphCall(function, inputs, written=written, products=products, writes_again=writes_again)
    # torch would save those that are written, too, and refuse them afterwards.
    unwritten = [None if number in written else one for number, one in enumerate(inputs)]
    return checkpoint(call, *unwritten, use_reentrant=False, preserve_rng_state=not draws_nothing())


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
    """Do not save the random state: forwards in this block draw none, and during a recording it cannot be read."""
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


def saved_hooks() -> Any:
    """Return the hooks that are called for what autograd saves; None without any."""
    return torch_private.top_saved_tensors_hooks(True)


def checkpoint_of(hooks: Any) -> Any:
    """Return the checkpoint of a user whose hooks these are; None if they are others."""
    if hooks is None or is_recomputed():
        return None
    pack: Any = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "frame" in cells:
        return cells["frame"].cell_contents
    # A recomputation.
    return cells["target_frame_ref"].cell_contents() if "target_frame_ref" in cells else None


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


class _Call:
    """One call of a unit. torch calls it for the forward, and with the same inputs for each recomputation."""

    def __init__(self, *, what: str, parameters: Sequence[nn.Parameter], products: Products | None) -> None:
        self._what = what
        self._parameters = parameters
        self._versions = self._now()
        self._is_over = False
        self._keep = Keep(products) if products is not None else None

    def _now(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self._parameters]

    def _first(self) -> Any:
        raise NotImplementedError

    def _again(self, *inputs: Any) -> None:
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> Any:
        if not self._is_over:
            self._is_over = True
            with _one_recomputed_unit(), self._keep or nullcontext():
                result = self._first()
            if self._versions != self._now():
                raise InvalidModel(
                    f"{self._what} writes into its parameters in forward, and a recomputation would write again: leave "
                    'it out by recompute_overrides = {"UNIT": "none"}'
                )
            return result
        if self._versions != self._now():
            # torch has the same check for weights that it saves, but recomputation saves none.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {self._what} changed between forward and the recomputation in backward; step the "
                "optimizer after backward"
            )
        with _one_recomputed_unit(), Give(self._keep) if self._keep is not None else nullcontext():
            return self._again(*inputs)


class _UnitCall(_Call):
    """A call in Python. `tree`, `places`: how its inputs are put together from the distinct ones that torch saves."""

    def __init__(
        self, unit: RecomputedUnit, inputs: tuple[Any, ...], options: dict[str, Any], *, tree: Any, places: list[int]
    ) -> None:
        super().__init__(what=type(unit.module).__name__, parameters=unit.parameters, products=unit.products)
        self._unit = unit
        self._tree = tree
        self._places = places
        # The forward gets the original objects: it may write into a list or dict that its caller reads.
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (inputs, options)
        self._state = UnitState(unit.modules)

    def _first(self) -> Any:
        assert self._given is not None
        (inputs, options), self._given = self._given, None
        return self._unit.forward(*inputs, **options)

    def _again(self, *distinct: Any) -> None:
        inputs, options = tree_unflatten([distinct[place] for place in self._places], self._tree)
        with self._state.restored():
            self._unit.forward(*inputs, **options)


class _GraphCall(_Call):
    """A call of a function of explicit inputs."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        *,
        written: AbstractSet[int],
        products: Products | None,
        writes_again: bool,
    ) -> None:
        parameters = [one for one in inputs if isinstance(one, nn.Parameter)]
        super().__init__(what="a unit", parameters=parameters, products=products)
        self._function = function
        self._given: tuple[Any, ...] = inputs
        self._writes_again = writes_again
        self._copies = {number: inputs[number] if writes_again else inputs[number].clone() for number in written}

    def _first(self) -> Any:
        given, self._given = self._given, ()
        return self._function(*given)

    def _again(self, *inputs: Any) -> None:
        # Copies, because there may be another recomputation.
        copies = {number: one if self._writes_again else one.clone() for number, one in self._copies.items()}
        self._function(*(copies.get(number, one) for number, one in enumerate(inputs)))
