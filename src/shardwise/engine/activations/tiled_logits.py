"""Logits of a tiled head, which never exist all at once: the loss that follows is computed tile by tile, too.

A head in tiles returns its input while a model trains. `F.cross_entropy` computes the logits of each tile and their
loss; backward computes both again, and adds up the gradients of the head's weights. The views and casts by which loops
come to the loss stay lazy: a shift by one token, `flatten`, `view`, `float`. Anything else computes all logits first,
and is right in any case.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map_only

from shardwise.engine.hooks.step_hooks import announce_also


class Head(Protocol):
    """A head that computes in tiles (tiled.py)."""

    inner: Callable[[Tensor], Tensor]

    @property
    def module(self) -> Any: ...

    def computed(self, x: Tensor, function: Callable[..., Tensor], *others: Tensor) -> Tensor: ...


class TiledLogits:
    """What a head makes of `x` (…, tokens, features).

    dtype       of the logits; None: the head's own
    is_matrix   the tokens of all samples are the rows of a matrix. x keeps its form: tiles are along a sequence
    """

    def __init__(self, x: Tensor, head: Head, *, dtype: torch.dtype | None = None, is_matrix: bool = False) -> None:
        self.x = x
        self.head = head
        self.form: dict[str, Any] = {"dtype": dtype, "is_matrix": is_matrix or x.dim() == 2}
        self._all: Tensor | None = None

    @property
    def is_matrix(self) -> bool:
        return bool(self.form["is_matrix"])

    @property
    def shape(self) -> torch.Size:
        tokens = (self.x.shape[:-1].numel(),) if self.is_matrix else self.x.shape[:-1]
        return torch.Size((*tokens, self.head.module.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self.form["dtype"] or self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        return True

    def of(self, x: Tensor) -> Tensor:
        """Return the logits of some tokens."""
        found, dtype = self.head.inner(x), self.form["dtype"]
        return found if dtype is None else found.to(dtype)

    def tensor(self) -> Tensor:
        """Return all logits."""
        if self._all is None:
            self._all = self.computed(self.of).view(self.shape)
        return self._all

    def computed(self, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """Return a function of the head's input, tile by tile."""
        found = self.head.computed(self.x, function, *others)
        if found.requires_grad:
            announce_also(found, output=self.x)
        return found

    # The way to the loss

    def float(self) -> "TiledLogits":
        return TiledLogits(self.x, self.head, **(self.form | {"dtype": torch.float32}))

    def contiguous(self) -> "TiledLogits":
        return self

    def view(self, *shape: Any) -> Any:
        return self._matrix() if self._is_of_matrix(shape) else self.tensor().view(*shape)

    def reshape(self, *shape: Any) -> Any:
        return self._matrix() if self._is_of_matrix(shape) else self.tensor().reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        is_matrix = start_dim == 0 and end_dim in (-2, len(self.shape) - 2)
        return self._matrix() if is_matrix else self.tensor().flatten(start_dim, end_dim)

    def _matrix(self) -> "TiledLogits":
        return TiledLogits(self.x, self.head, **(self.form | {"is_matrix": True}))

    def _is_of_matrix(self, shape: Sequence[Any]) -> bool:
        """Return whether this is the shape of a matrix with the logits of one token in each row."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
        rows, columns = self.x.shape[:-1].numel(), self.shape[-1]
        return wanted in ((-1, columns), (rows, columns), (rows, -1))

    def __getitem__(self, index: Any) -> Any:
        # As in `logits[..., :-1, :]`: all logits of some tokens.
        is_of_tokens = isinstance(index, tuple) and len(index) == 3 and index[0] is ... and index[2] == slice(None)
        if is_of_tokens and isinstance(index[1], slice) and not self.is_matrix:
            return TiledLogits(self.x[index], self.head, **self.form)
        return self.tensor()[index]

    # Everything else

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _cross_entropy(*args, **kwargs) if function is F.cross_entropy else None
        if found is not None:
            return found
        args, kwargs = tree_map_only(TiledLogits, TiledLogits.tensor, (tuple(args), dict(kwargs)), is_leaf=_is_lazy)
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def _cross_entropy(
    logits: Any,
    targets: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss of a matrix of logits and one class per row; None for what is not computed in tiles."""
    is_plain = all(one is None for one in (weight, size_average, reduce)) and not label_smoothing
    # Of another number of classes, torch says what is wrong.
    is_of_rows = _is_lazy(logits) and logits.is_matrix and targets.shape == logits.shape[:1]
    if not is_plain or not is_of_rows or reduction not in ("mean", "sum"):
        return None

    def losses(x: Tensor, wanted: Tensor) -> Tensor:
        rows = logits.of(x).flatten(0, -2)
        found = F.cross_entropy(rows, wanted.flatten(), ignore_index=ignore_index, reduction="none")
        return found.view(wanted.shape)

    classes = targets.reshape(*logits.x.shape[:-1], 1)
    total: Tensor = logits.computed(losses, classes).sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _is_lazy(one: Any) -> bool:
    return isinstance(one, TiledLogits)


def _of_tensor(name: str) -> Callable[..., Any]:
    def method(self: TiledLogits, *given: Any) -> Any:
        return getattr(self.tensor(), name)(*given)

    return method


# Python looks for these in the class.
for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "rpow", "neg"),
    *("abs", "eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "setitem", "invert", "mod", "floordiv"),
):
    setattr(TiledLogits, f"__{_name}__", _of_tensor(f"__{_name}__"))
# Comparisons are those of tensors, but it can still be a key.
TiledLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

# A model's outputs are searched for tensors whose gradients begin its backward.
register_pytree_node(
    TiledLogits,
    lambda logits: ([logits.x], (logits.head, logits.form)),
    lambda x, made: TiledLogits(next(iter(x)), made[0], **made[1]),
)
