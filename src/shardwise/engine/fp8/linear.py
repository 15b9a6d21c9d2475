"""A linear layer that multiplies in fp8, forward and backward; everything outside of the products is bf16.

    y = x · wᵀ          x and w in e4m3
    dx = dy · w         dy in e5m2 under the tensorwise recipe, in e4m3 under the rowwise one
    dw = dyᵀ · x

Tensorwise: one scale per operand, so that a cast operand serves two products. Rowwise: one scale for each row of the
left operand and each column of the right one, so that each product has its own casts.

On a device without such products (a CPU) they are emulated: the same casts, and a product in float32. So the layer can
be tested anywhere.

We cast and multiply here ourselves rather than by torchao: its linear layer needs weights of a tensor subclass, whose
fp8 gather is bound to fully_shard's hooks; ours are plain views of a flat buffer.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.base.errors import ShardwiseError
from shardwise.engine.fp8.casts import E4M3, E5M2, Fp8Values, cast, cast_by, reciprocal
from shardwise.program.buffers import MULTIPLE


def product(left: Fp8Values, right: Fp8Values, *, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return left · right. `fast`: sums lose some low bits, which a forward can do without and gradients cannot."""
    if left.values.device.type == "cuda":
        return hardware_product(left, right, dtype=dtype, fast=fast)
    return (left.values.to(torch.float32) @ right.values.to(torch.float32) * left.inverse * right.inverse).to(dtype)


def hardware_product(left: Fp8Values, right: Fp8Values, *, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return left · right by the device's fp8 kernel. A trace calls it with fake tensors of any device."""
    # The hardware wants rows of the left operand and columns of the right one end to end.
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values.t().contiguous().t(),
        scale_a=left.inverse,
        scale_b=right.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _t(operand: Fp8Values) -> Fp8Values:
    return Fp8Values(operand.values.t(), operand.inverse.t())


class _Tensorwise(torch.autograd.Function):
    """x · wᵀ with one scale per operand. The input is saved in fp8, in half the memory of bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _give_none(ctx)
        cast_x, cast_weight = cast(x, dtype=E4M3), cast(weight, dtype=E4M3)
        ctx.save_for_backward(cast_x.values, cast_x.inverse, weight, cast_weight.inverse)
        return product(cast_x, _t(cast_weight), dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        values, inverse, weight, weight_inverse = ctx.saved_tensors
        cast_weight = Fp8Values(cast_by(weight, reciprocal(weight_inverse), dtype=E4M3), weight_inverse)
        return _gradients(ctx, cast(grad, dtype=E5M2), cast_weight, Fp8Values(values, inverse), dtype=grad.dtype)


class _Gathered(torch.autograd.Function):
    """x · wᵀ with a weight that was gathered in fp8. `weight` itself only takes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, values: Tensor, inverse: Tensor) -> Tensor:
        _give_none(ctx)
        cast_x = cast(x, dtype=E4M3)
        # The weight as well: an update before backward is then torch's error, as with any other layer.
        ctx.save_for_backward(cast_x.values, cast_x.inverse, values, inverse, weight)
        return product(cast_x, _t(Fp8Values(values, inverse)), dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        x, x_inverse, values, inverse, _ = ctx.saved_tensors
        weight = Fp8Values(values, inverse)
        grads = _gradients(ctx, cast(grad, dtype=E5M2), weight, Fp8Values(x, x_inverse), dtype=grad.dtype)
        return (*grads, None, None)


class _Rowwise(torch.autograd.Function):
    """x · wᵀ with a scale for each row of x and of w, and in backward for those of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _give_none(ctx)
        ctx.save_for_backward(x, weight)
        return product(cast(x, dtype=E4M3, dim=1), _t(cast(weight, dtype=E4M3, dim=1)), dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(cast(grad, dtype=E4M3, dim=1), cast(weight, dtype=E4M3, dim=0), dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            grad, x = _whole_blocks(grad), _whole_blocks(x)
            grad_weight = product(_t(cast(grad, dtype=E4M3, dim=0)), cast(x, dtype=E4M3, dim=0), dtype=grad.dtype)
        return grad_x, grad_weight


def _give_none(ctx: Any) -> None:
    """Give backward None where a later function returned None as the gradient, as torch's layers do; not zeros."""
    if not torch.compiler.is_compiling():
        # Compiled code is given zeros in any case.
        ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad: Fp8Values, weight: Fp8Values, x: Fp8Values, *, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = product(grad, weight, dtype=dtype) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return grad_x, None
    rows, columns = (Fp8Values(_whole_blocks(one.values), one.inverse) for one in (grad, x))
    return grad_x, product(_t(rows), columns, dtype=dtype)


def _whole_blocks(matrix: Tensor) -> Tensor:
    """Return the matrix with rows of zeros up to what a product over its rows needs."""
    missing = -matrix.shape[0] % MULTIPLE
    if not missing:
        return matrix
    # As integers: not every device joins fp8 tensors. Zero is zero in all of them.
    bits = matrix.view(torch.uint8 if matrix.itemsize == 1 else torch.int16)
    return functional.pad(bits, (0, 0, 0, missing)).view(matrix.dtype)


class Fp8Linear(nn.Linear):
    """An nn.Linear whose product is in fp8. A module becomes one by its class, and stays the same object."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        if x.dtype is not weight.dtype and torch.is_autocast_enabled(x.device.type):
            x = x.to(weight.dtype)
        if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or not x.numel():
            # With the masters of shardwise.whole; or what nn.Linear would refuse.
            return functional.linear(x, weight, self.bias)
        output = self.multiply(x.reshape(-1, self.in_features), weight)
        output = output.view(*x.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x · wᵀ."""
        raise NotImplementedError


class TensorwiseLinear(Fp8Linear):
    """One scale per tensor; the weight is cast here."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _Tensorwise.apply(x, weight)  # type: ignore[no-untyped-call]
        return product


class RowwiseLinear(Fp8Linear):
    """One scale per row."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _Rowwise.apply(x, weight)  # type: ignore[no-untyped-call]
        return product


class GatheredLinear(Fp8Linear):
    """One scale per tensor; the weight was gathered in fp8."""

    fp8_weight: Tensor
    fp8_inverse: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The parameter. It has no values while its unit computes: only fp8 ones were gathered."""
        found = self._parameters["weight"]
        assert found is not None
        if found.dtype is torch.bfloat16 and type(found) is nn.Parameter and not found.stride(-1):
            raise ShardwiseError(
                f"the weight of {type(self).__name__}({self.in_features}, {self.out_features}) is gathered in fp8, and "
                "code other than the layer itself reads it in a forward: name the layer in keep_bf16"
            )
        return found

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _Gathered.apply(x, weight, self.fp8_weight, self.fp8_inverse)  # type: ignore[no-untyped-call]
        return product


@cache
def fp8_class(own: Any, *, base: Any) -> type[nn.Linear]:
    """Return the class of modules of class `own` that multiply in fp8. One for all: they share compiled code."""
    return type(own.__name__, (base, own), {"__module__": own.__module__})
