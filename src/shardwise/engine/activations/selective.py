"""Selective recomputation: the outputs of matrix products, convolutions and fused attention are kept.

`Keep` runs around a unit's forward and keeps them in order; `Give` runs around its recomputation and returns them
instead of computing them. A recomputation stops as soon as it has all that backward needs, typically before the unit's
last product. The number of products that it needs is learned, and later ones are no longer kept; one that is needed
after all, or was modified, is computed again.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import OpOverload, TorchDispatchMode
from shardwise.engine.activations.saved import Kept, SavedTensor

_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "convolution", "_convolution",
        "convolution_overrideable", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "_addmm_activation",
    )
)  # fmt: skip


@cache
def is_product(operation: Any) -> bool:
    """Return whether the operation's outputs are kept: a product, or fused attention, torch's own or a library's.

    Not those of an operation that writes into its arguments, which has to run again.
    """
    if not isinstance(operation, OpOverload) or operation._schema.is_mutable:
        return False
    name = operation._schema.name
    return name in _PRODUCTS or (("attention" in name or "attn" in name) and "backward" not in name)


@cache
def written_arguments(operation: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an operation writes into."""
    if not isinstance(operation, OpOverload) or not operation._schema.is_mutable:
        return ()
    arguments = enumerate(operation._schema.arguments)
    return tuple(at for at, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


class _Keeping(threading.local):
    """Whether any products are kept; per thread, because backward recomputes on other threads."""

    any = True


_keeping = _Keeping()


@contextmanager
def keeping_no_products() -> Iterator[None]:
    """Compute the products of this block in every recomputation."""
    outer, _keeping.any = _keeping.any, False
    try:
        yield
    finally:
        _keeping.any = outer


class Products:
    """State shared by all calls of a unit: the pack function, and the most products that a recomputation has used."""

    def __init__(self, *, pack: Any = Kept) -> None:
        self.pack = pack
        # None before the first recomputation: all products are kept.
        self.num_needed: int | None = None


class _Product:
    """The outputs of an operation, and the random state after it if it draws random numbers."""

    __slots__ = ("operation", "outputs", "random_state")

    def __init__(self, operation: Any, outputs: Any, *, random_state: Tensor | None) -> None:
        self.operation = operation
        self.outputs = outputs
        self.random_state = random_state

    @property
    def intact(self) -> bool:
        if isinstance(self.outputs, SavedTensor):
            return self.outputs.intact
        return all(output.intact for output in tree_leaves(self.outputs) if isinstance(output, SavedTensor))

    def tensors(self) -> Any:
        if isinstance(self.outputs, SavedTensor):
            return self.outputs.tensor()
        return tree_map_only(SavedTensor, lambda output: output.tensor(), self.outputs)


class Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the products of a forward in `self.products`."""

    def __init__(self, unit: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = unit
        self.products: list[_Product | None] = []
        # Storage of an output → where it is in `products`.
        self._places: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs) if kwargs else func(*args)
        for index in written_arguments(func):
            self._drop_written(args[index] if index < len(args) else None)
        if _keeping.any and is_product(func):
            most = self.unit.num_needed
            if most is None or len(self.products) < most:
                self._keep(func, args, kwargs or {}, outputs)
        return outputs

    def _keep(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if any(isinstance(output, Tensor) and output.is_inference() for output in tree_leaves(outputs)):
            # Nothing would count writes to it. It is computed again.
            self.products.append(None)
            return
        pack = self.unit.pack
        kept = pack(outputs) if isinstance(outputs, Tensor) else tree_map_only(Tensor, pack, outputs)
        state = _random_state(args[0].device) if _draws(func, args, kwargs) else None
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._places[output.untyped_storage()._cdata] = len(self.products)
        self.products.append(_Product(func, kept, random_state=state))

    def _drop_written(self, tensor: Any) -> None:
        """Drop the output that a tensor is part of. The results of `unsafe_chunk` count versions by themselves."""
        if isinstance(tensor, Tensor) and self._places:
            place = self._places.pop(tensor.untyped_storage()._cdata, None)
            if place is not None:
                self.products[place] = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # Products that an in-place activation has overwritten cannot be used.
        self.products = [product if product and product.intact else None for product in self.products]


class Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns kept products in a recomputation of the forward that `kept` ran around."""

    def __init__(self, kept: Keep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = kept.unit
        self.products = kept.products
        self.position = 0
        self.in_order = True
        # Then each product is dropped when it is used; if it is needed again, it is computed again.
        self.last_backward = not torch_private.keeps_graph()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = self._next(func) if _keeping.any and is_product(func) else None
        if product is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if product.random_state is not None:
            _set_random_state(args[0].device, product.random_state)
        return product.tensors()

    def _next(self, func: Any) -> _Product | None:
        position = self.position
        self.position += 1
        product = self.products[position] if position < len(self.products) else None
        if product is None:
            return None
        if self.last_backward:
            self.products[position] = None
        self.in_order = self.in_order and product.operation is func
        return product if self.in_order and product.intact else None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.unit.num_needed = max(self.unit.num_needed or 0, self.position)


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operation draws random numbers, which a recomputation that skips it has to skip as well."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


def _random_state(device: torch.device) -> Any:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
