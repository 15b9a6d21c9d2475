"""Keeps activations in host memory until backward.

Tensors that autograd saves within a unit's forward are copied to the host while the device computes, storage by
storage: all views of one storage share a copy. Their device memory is released when the next unit's forward ends, so at
most two units' activations are being copied out. When backward reaches a unit, the activations of the next one are
already being copied in. The unit that backward reached first in the last step is needed at once, and stays.

Memory that a copy still uses is not freed: the compute stream waits for the copy, then the reference is dropped. A
tensor that was modified after it was saved is refused, as torch does, even though the copy has the old value.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.base.torch_internals import torch_private
from shardwise.engine.activations.recompute import checkpoint_of, is_recomputed, replace_forward, saved_hooks
from shardwise.engine.activations.saved import Kept, SavedTensor, detach
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.offload.transfer import Lane, lane_of
from shardwise.program.rules.context import MOST_SAVED, overdue

# It is cheaper to keep smaller storages than to copy them.
_LEAST_BYTES_ON_GPU = 2**20
# The copy of a storage is only worth it if the saved view is at least this part of it.
_LEAST_PART = 1 / 4


def offload_unit(module: nn.Module, *, name: str, offload: "ActivationOffload") -> Callable[[], None]:
    """Keep the tensors that `module` saves for backward in host memory. Returns the undo.

    Comes after `recompute_unit`, so that the inputs from which a unit is recomputed are offloaded too.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*inputs: Any, **options: Any) -> Any:
        # A unit within a recomputed one, or in the user's own checkpoint, saves tensors only for a short time.
        if is_recomputed() or not torch.is_grad_enabled() or checkpoint_of(saved_hooks()) is not None:
            return inner(*inputs, **options)
        with offload.call(name):
            return inner(*inputs, **options)

    return replace_forward(module, forward)


class ActivationOffload:
    """Copies the tensors that the units of `model` save.

    Parameters, buffers and their views are not copied: they stay on the device anyway, and a parameter may be freed by
    the time it is read. Nor are storages of less than `min_bytes`.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, min_bytes: int | None = None) -> None:
        self.model = model
        self.device = device
        self.min_bytes = (_LEAST_BYTES_ON_GPU if device.type == "cuda" else 0) if min_bytes is None else min_bytes
        self.lane: Lane = lane_of(device)
        # By address of storage, and version. A copy keeps the address in use, so no other storage can get it.
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], _Copy] = weakref.WeakValueDictionary()
        self._call: _Call | None = None
        # The last call that has saved a tensor.
        self._latest: weakref.ref[_Call] | None = None
        self._outgoing: deque[list[_Copy]] = deque()
        # Device memory that is being filled, by id, with the number of the `_bring` that began it.
        self._incoming: dict[int, tuple[int, Tensor, Any]] = {}
        self._num_brought = 0
        # Calls of this step so far; the one that backward reached first in the last step; where backward is now.
        self._num_calls = 0
        self._first_in_backward = -1
        self._in_forward = True
        self._at: weakref.ref[_Call] | None = None

    @functools.cached_property
    def _resident(self) -> set[int]:
        """Storages of parameters and buffers; read at the first call, after `prepare` has replaced them."""
        with unguarded():
            tensors = (*self.model.parameters(), *self.model.buffers())
            return {tensor.untyped_storage()._cdata for tensor in tensors}

    # Forward

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Offload the tensors that a unit's forward saves in this block."""
        outer = self._call
        self._call = call = _Call(name, number=self._number())
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._call = outer
            self._outgoing.append(call.outgoing)
            call.outgoing = []
            for copies in overdue(self._outgoing, most=MOST_SAVED):
                for copy in copies:
                    self._release(copy)

    def _number(self) -> int:
        if torch_private.current_graph_task_id() != -1:
            return -2  # a hook of the user calls the unit
        if not self._in_forward:
            self._in_forward = True
            self._num_calls = 0
            self._drop_unused(before=self._num_brought + 1)
        self._num_calls += 1
        return self._num_calls

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Return the object that autograd keeps instead of the tensor."""
        call = self._call
        if call is None or not self._is_offloaded(tensor):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        # Once written to, parts of a storage may count versions by themselves, as the results of `unsafe_chunk` do.
        part = (tensor.storage_offset(), tensor.numel()) if tensor._version else None
        key = (storage._cdata, tensor._version, part)
        copy = self._copies.get(key)
        if copy is None:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = self._copies[key] = _Copy(source)
            if call.number != self._first_in_backward:
                copy.host, copy.event = self.lane.send(source)
                call.outgoing.append(copy)
        if not call.copies:
            call.before, self._latest = self._latest, weakref.ref(call)
        call.copies[key] = weakref.ref(copy)
        return _Offloaded(tensor, copy=copy, call=call, offload=self)

    def _is_offloaded(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return False
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        large = num_bytes >= max(1, self.min_bytes) and tensor.nbytes >= _LEAST_PART * num_bytes
        return large and storage._cdata not in self._resident

    # Backward

    def unpack(self, saved: SavedTensor) -> Tensor:
        """Return the saved tensor to autograd."""
        if not saved.intact:
            where = f" (saved in {saved.call.name})" if isinstance(saved, _Offloaded) else ""
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation" + where
            )
        return saved.tensor()

    def fetch(self, copy: "_Copy", *, call: "_Call") -> Tensor:
        """Return the bytes of a copy on the device; begin to copy in those that backward needs next."""
        self._reach(call)
        if copy.present is None:
            self._bring([copy])
        self._settle(copy)
        assert copy.present is not None
        return copy.present

    def _reach(self, call: "_Call") -> None:
        """Note that backward has reached a call: begin to copy in its tensors and those of the call before it."""
        task = torch_private.current_graph_task_id()
        if task in (-1, call.task):
            return
        call.task = task
        if self._in_forward:
            self._in_forward = False
            self._first_in_backward = call.number
            self._outgoing.clear()
        left = self._at() if self._at is not None else None
        self._at = weakref.ref(call)
        if left is not None and torch_private.keeps_graph():
            # Autograd keeps these for another backward.
            for copy in left.saved():
                self._release(copy)
        self._bring(call.saved())
        before = call.before() if call.before is not None else None
        if before is not None:
            self._bring(before.saved())

    # Memory

    def _bring(self, copies: "list[_Copy]") -> None:
        """Begin to copy in what is not on the device; the last saved first, in backward's order."""
        missing = [copy for copy in reversed(copies) if copy.present is None]
        if not missing:
            return
        self._num_brought += 1
        self._drop_unused(before=self._num_brought - 1)
        hosts = [copy.host for copy in missing if copy.host is not None]
        for copy, (present, event) in zip(missing, self.lane.bring(hosts), strict=True):
            copy.present, copy.event = present, event
            self._incoming[id(present)] = (self._num_brought, present, event)

    def _settle(self, copy: "_Copy") -> None:
        """Wait for the copy's transfer: its memory on the device may then be read, or freed."""
        if copy.event is not None:
            self.lane.wait(copy.event)
            copy.event = None
            self._incoming.pop(id(copy.present), None)

    def _release(self, copy: "_Copy") -> None:
        if copy.host is not None:
            self._settle(copy)
            copy.present = None

    def _drop_unused(self, *, before: int) -> None:
        """Drop memory that was filled for a backward that did not need it."""
        for key, (number, _, event) in list(self._incoming.items()):
            if number < before:
                self.lane.wait(event)
                del self._incoming[key]


class _Call:
    """One call of a unit, and the copies of its saved tensors. Autograd's saved tensors keep it alive."""

    __slots__ = ("__weakref__", "before", "copies", "name", "number", "outgoing", "task")

    def __init__(self, name: str, *, number: int) -> None:
        self.name = name
        self.number = number
        self.before: weakref.ref[_Call] | None = None
        self.copies: dict[tuple[Any, ...], weakref.ref[_Copy]] = {}
        self.outgoing: list[_Copy] = []
        # The backward that has reached it.
        self.task = -1

    def saved(self) -> "list[_Copy]":
        return [copy for copy in (reference() for reference in self.copies.values()) if copy is not None]


class _Copy:
    """The bytes of one storage: on the device (`present`), in host memory, or in transfer until `event`."""

    __slots__ = ("__weakref__", "event", "host", "present", "storage")

    def __init__(self, source: Tensor) -> None:
        self.storage = StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]
        self.present: Tensor | None = source
        self.host: Tensor | None = None
        self.event: Any = None


class _Offloaded(SavedTensor):
    """One saved tensor: a view of a copy."""

    __slots__ = ("call", "copy", "dtype", "offload", "offset", "shape", "stride", "version", "witness")

    def __init__(self, tensor: Tensor, *, copy: _Copy, call: _Call, offload: ActivationOffload) -> None:
        self.copy = copy
        self.call = call
        self.offload = offload
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        # Shares the tensor's version counter, not its memory.
        self.witness = detach(tensor)
        self.witness.data = torch.empty(0, dtype=tensor.dtype)

    @property
    def intact(self) -> bool:
        return self.witness._version == self.version

    def tensor(self) -> Tensor:
        present = self.offload.fetch(self.copy, call=self.call)
        empty = torch.empty(0, dtype=self.dtype, device=present.device)
        return empty.set_(present.untyped_storage(), self.offset, self.shape, self.stride)
