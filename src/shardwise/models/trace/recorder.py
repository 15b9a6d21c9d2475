"""Records every operation of a step, and the allocation and release of every storage, in order."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.base.torch_internals.torch_private import FakeTensor, TorchDispatchMode
from shardwise.models.trace.values import KnownValues, tensors_in


@dataclass(slots=True)
class Born:
    storage: int
    num_bytes: int
    is_weight_copy: bool = False


@dataclass(slots=True)
class Died:
    storage: int


@dataclass(slots=True)
class Accumulated:
    """The storage became the gradient of a parameter of `unit`."""

    storage: int
    unit: str


@dataclass(slots=True)
class Did:
    """An operation. `scratch_bytes`: allocated and freed while it runs. `sums`: (rows, columns) of a column sum."""

    name: str
    num_flops: int
    num_bytes: int
    dims: tuple[int, ...] = ()
    scratch_bytes: int = 0
    sums: tuple[int, int] | None = None


@dataclass(slots=True)
class RowMark:
    trigger: str
    unit: str
    call: int = 0


TraceEntry = Born | Died | Accumulated | Did | RowMark
Scratch = Callable[[tuple[Any, ...], Any], int]


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run under it. Storages that exist before are excluded by `ignore`.

    `scratch`: operation → bytes that it allocates and frees while it runs. `in_fp32`: operation → outputs that are fp32
    on the planned device, but narrower in the trace. `values`: those that the model reads.
    """

    def __init__(
        self,
        *,
        scratch: Mapping[str, Scratch],
        in_fp32: Mapping[str, tuple[int, ...]],
        values: KnownValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[TraceEntry] = []
        self.in_backward = False
        self._scratch = scratch
        self._in_fp32 = in_fp32
        self._values = values or KnownValues()
        self._ids: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._num_storages = 0
        # Sizes of storages with two or more dimensions; single rows or columns may be equally large by chance.
        self._matrices: dict[int, int] = {}
        self._weights: set[int] = set()
        # Bytes of the outputs inside `fused`; None outside.
        self._fused_bytes: int | None = None
        # The sum of two gradients → the first of them, whose memory autograd reuses for the sum.
        self._takes_over: dict[int, int] = {}
        self._alias: dict[int, int] = {}

    def ignore(self, tensor: Tensor, *, is_weight: bool = False) -> None:
        """Exclude a storage that exists already: a parameter, a buffer, a part of the batch."""
        key = tensor.untyped_storage()._cdata
        self._ids[key] = -1
        if is_weight:
            self._weights.add(key)

    def mark(self, trigger: str, unit: str, call: int = 0) -> None:
        self.entries.append(RowMark(trigger, unit, call))

    def accumulated(self, grad: Tensor, *, unit: str) -> None:
        if not grad.untyped_storage().nbytes():
            # A parameter without elements: nothing was allocated.
            return
        storage = self._ids[grad.untyped_storage()._cdata]
        self.entries.append(Accumulated(self._alias.get(storage, storage), unit))

    @contextmanager
    def fused(self, name: str) -> Iterator[None]:
        """Record everything inside as one operation."""
        self._fused_bytes = 0
        try:
            yield
        finally:
            self.entries.append(Did(name, num_flops=0, num_bytes=self._fused_bytes))
            self._fused_bytes = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # More than half of all calls ask for the device of a tensor; the modes below take long for it.
            return args[0].fake_device
        options = kwargs or {}
        inputs = tensors_in((args, options))
        out = self._values.run(func, args, options, inputs)
        if func.namespace == "prim":
            return out
        outputs = tensors_in(out)
        is_copy = func is torch.ops.aten._to_copy.default and inputs[0].untyped_storage()._cdata in self._weights
        before = len(self.entries)
        in_fp32 = self._in_fp32.get(func.overloadpacket.__name__, ())
        for place, tensor in enumerate(outputs):
            size = 4 if place in in_fp32 else tensor.element_size()
            self._watch(tensor, times=size // tensor.element_size(), is_weight_copy=is_copy)
        computes = len(self.entries) > before or func._schema.is_mutable
        if self._fused_bytes is not None:
            self._fused_bytes += _num_bytes(outputs)
        elif computes:
            # After its outputs: an operation needs its scratch memory in addition to them.
            self.entries.append(self._operation(func, args, options, out, inputs, outputs))
        if self.in_backward and func is torch.ops.aten.add.Tensor and len(self.entries) == before + 2:
            self._sum_of_gradients(inputs, outputs)
        return out

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Record an operation of compiled code, which this mode does not intercept."""
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        for tensor in outputs:
            self._watch(tensor)
        self.entries.append(self._operation(func, args, kwargs, out, inputs, outputs))

    def record_written(self, tensors: Iterable[Tensor], *, since: int) -> None:
        """Record the outputs of one kernel of compiled code; the entries `since` are storages released with it.

        An output reuses the memory of a released storage of equal size; all others are allocated before the releases.
        """
        died = self.entries[since:]
        del self.entries[since:]
        for tensor in tensors:
            self._watch(tensor)
        free = [self._matrices.get(entry.storage) for entry in died if isinstance(entry, Died)]
        added, in_place = [], []
        for born in self.entries[since:]:
            assert isinstance(born, Born)
            if born.storage in self._matrices and born.num_bytes in free:
                free.remove(born.num_bytes)
                in_place.append(born)
            else:
                added.append(born)
        self.entries[since:] = [*added, *died, *in_place]

    def _operation(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Did:
        name = func.overloadpacket.__name__
        if name == "_grouped_mm":
            return _grouped_product(inputs, outputs)
        scratch = self._scratch.get(name)
        return Did(
            name,
            num_flops=_num_flops(func, args, kwargs or {}, out),
            num_bytes=_num_bytes((*inputs, *outputs)),
            dims=_dims(name, inputs) or _strided(func, inputs, outputs),
            scratch_bytes=scratch(args, out) if scratch else 0,
            sums=_column_sum(func, args),
        )

    def _watch(self, tensor: Tensor, *, times: int = 1, is_weight_copy: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ids or not storage.nbytes():
            return
        number = self._ids[key] = self._num_storages
        self._num_storages += 1
        self._watches[key] = weakref.ref(storage, lambda _: self._died(key))
        if sum(size > 1 for size in tensor.shape) > 1:
            self._matrices[number] = times * storage.nbytes()
        self.entries.append(Born(number, times * storage.nbytes(), is_weight_copy))

    def _died(self, key: int) -> None:
        number = self._ids.pop(key)
        del self._watches[key]
        for total, part in self._takes_over.items():
            if part == number:
                del self._takes_over[total]
                if self._continues(total):
                    self._alias[total] = self._alias.pop(part, part)
                    return
                break
        self.entries.append(Died(self._alias.pop(number, number)))

    def _sum_of_gradients(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note a sum of gradients, which autograd makes in place if a tensor has several uses.

        Under a dispatch mode (input_buffer.cpp, can_accumulate_inplace) it makes a new tensor instead and drops the
        first one immediately, which identifies such a sum. A first gradient that is a view is never reused.
        """
        if inputs[0]._is_view():
            return
        first, total = inputs[0].untyped_storage(), outputs[0].untyped_storage()
        if first.nbytes() == total.nbytes() and first._cdata in self._ids:
            self._takes_over[self._ids[total._cdata]] = self._ids[first._cdata]

    def _continues(self, total: int) -> bool:
        """Return whether nothing happened since the sum was allocated; if so, drop that allocation."""
        *_, born, did = self.entries
        if isinstance(born, Born) and born.storage == total and isinstance(did, Did):
            del self.entries[-2]
            return True
        return False


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count operations as torch does, but of causal attention only the half that its kernels compute."""
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    name = func.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        # torch 2.11 cannot count attention whose heads share keys.
        query, key, value = given["query"], given["key"], given["value"]
        num_flops = _attention_flops(query, key, value, is_backward=name.endswith("_backward"))
    else:
        num_flops = int(count(*args, **kwargs, out_val=out))
    return num_flops // (2 if given.get("is_causal") else 1)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, is_backward: bool) -> int:
    """Count queries × keys and scores × values; backward repeats the first, and has two more products for each."""
    batch, heads, num_queries, width = query.shape
    widths = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    return 2 * batch * heads * num_queries * key.shape[2] * widths


def _column_sum(func: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return (rows, columns) of a sum over all dimensions but the last, as of the gradient of a bias."""
    if func is not torch.ops.aten.sum.dim_IntList or args[0].dim() < 2:
        return None
    *rows, columns = args[0].shape
    return (prod(rows), columns) if list(args[1]) == list(range(len(rows))) else None


def _dims(name: str, inputs: list[Tensor]) -> tuple[int, ...]:
    """Return the dimensions of a matrix product or of attention (spec.step.Op)."""
    if name.startswith("_scaled_dot_product"):
        query, key = inputs[1:3] if name.endswith("_backward") else inputs[:2]
        return (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return ()
    left, right = inputs[-2:]
    return (*left.shape[:-2], left.shape[-2], right.shape[-1], left.shape[-1])


def _grouped_product(inputs: list[Tensor], outputs: list[Tensor]) -> Did:
    """Return the products of experts, each with its own rows, as one batched product of equal shares.

    The rows of all experts lie in one matrix: the left one, or, for the gradient of weights, its columns.
    """
    left, right = inputs[:2]
    experts = outputs[0].shape[0] if outputs[0].dim() == 3 else right.shape[0]
    rows, shared = left.shape[-2:]
    if outputs[0].dim() == 3 and left.dim() == 2:
        shared //= experts
    elif left.dim() == 2:
        rows //= experts
    dims = (experts, rows, right.shape[-1], shared)
    return Did("bmm", num_flops=2 * prod(dims), num_bytes=_num_bytes((*inputs, *outputs)), dims=dims)


def _strided(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[int, ...]:
    """Return (elements,) of an elementwise operation whose kernel computes the address of each element.

    If all operands have the same layout without gaps, the kernel reads several elements at a time: return ().
    """
    name = func.overloadpacket.__name__
    if name == "slice_backward":
        # It fills zeros and copies into a part of them.
        return (outputs[0].numel(),)
    if name == "cat":
        return () if all(tensor.is_contiguous() for tensor in inputs) else (outputs[0].numel(),)
    # A copy into another layout has its own kernel.
    if name == "clone" or torch.Tag.pointwise not in func.tags or not outputs:
        return ()
    layouts = {_layout(tensor) for tensor in (*inputs, *outputs) if tensor.dim()}
    return () if len(layouts) <= 1 and all(map(_is_dense, layouts)) else (outputs[0].numel(),)


def _layout(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return size and stride of each dimension with more than one element."""
    return tuple((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _is_dense(layout: tuple[tuple[int, int], ...]) -> bool:
    """Return whether there are no gaps, in any order of the dimensions."""
    expected = 1
    for size, stride in sorted(layout, key=lambda place: place[1]):
        if stride != expected:
            return False
        expected *= size
    return True
