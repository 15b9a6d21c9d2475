"""Activations that wait for backward in host memory.

What autograd saves within a unit's forward is copied out while the device computes, storage by storage: views of one
storage, and whatever saves it again, share a copy. Its device memory is let go when the next unit's forward ends, so at
most two units' activations are on the way out. When backward comes to a unit, what the next one saved is brought in
already. The unit that backward came to first in the last step is needed at once, and stays.

Memory that a copy still uses is not handed back: the stream that computes waits for the copy, then the reference is
dropped. A tensor that was written into after it was saved is refused, as torch does, even if the copy is good.
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

from shardwise.engine.activations.recompute import is_recomputed, replace_forward
from shardwise.engine.activations.saved import Kept, SavedTensor, detach
from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.offload.transfer import Lane, lane_of

# Smaller storages cost more to move than to keep.
_LEAST_BYTES_ON_GPU = 2**20
# A view of a smaller part of its storage would take along too much that backward does not need.
_LEAST_PART = 1 / 4


def offload_unit(module: nn.Module, *, name: str, offload: "ActivationOffload") -> Callable[[], None]:
    """Let what backward needs of `module` wait in host memory. Returns the undo.

    Comes after `recompute_unit`, so that the inputs from which a unit is recomputed are offloaded too.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*inputs: Any, **options: Any) -> Any:
        # A unit within a recomputed one saves nothing that waits for long.
        if is_recomputed() or not torch.is_grad_enabled():
            return inner(*inputs, **options)
        with offload.call(name):
            return inner(*inputs, **options)

    return replace_forward(module, forward)


class ActivationOffload:
    """Moves what the units of `model` save.

    Parameters and buffers stay on the device anyway, and a parameter may be freed by the time it is read: they and
    their views are not copied. Nor is what takes less than `min_bytes`.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, min_bytes: int | None = None) -> None:
        self.model = model
        self.device = device
        self.min_bytes = (_LEAST_BYTES_ON_GPU if device.type == "cuda" else 0) if min_bytes is None else min_bytes
        self.lane: Lane = lane_of(device)
        # By address of storage, and version. A copy holds on to the address, so no other storage can get it.
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], _Copy] = weakref.WeakValueDictionary()
        self._call: _Call | None = None
        # The last call that saved anything.
        self._latest: weakref.ref[_Call] | None = None
        self._going: deque[list[_Copy]] = deque()
        # Memory that is being filled, by address, with the number of the `_bring` that began it.
        self._coming: dict[int, tuple[int, Tensor, Any]] = {}
        self._num_brought = 0
        # Calls of this step so far; the one that backward came to first in the last step; where backward is.
        self._num_calls = 0
        self._first_in_backward = -1
        self._in_forward = True
        self._at: weakref.ref[_Call] | None = None

    @functools.cached_property
    def _resident(self) -> set[int]:
        """Storages of parameters and buffers; asked for at the first call, when `prepare` has given them theirs."""
        with unguarded():
            tensors = (*self.model.parameters(), *self.model.buffers())
            return {tensor.untyped_storage()._cdata for tensor in tensors}

    # Forward

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A unit's forward."""
        outer = self._call
        self._call = call = _Call(name, number=self._number())
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._call = outer
            self._going.append(call.going)
            call.going = []
            while len(self._going) > 1:
                for copy in self._going.popleft():
                    self._let_go(copy)

    def _number(self) -> int:
        if torch._C._current_graph_task_id() != -1:
            return -2  # a checkpoint of the user's, which calls the unit again
        if not self._in_forward:
            self._in_forward = True
            self._num_calls = 0
            self._drop_unused(before=self._num_brought + 1)
        self._num_calls += 1
        return self._num_calls

    def pack(self, tensor: Tensor) -> SavedTensor:
        """What autograd holds instead of the tensor."""
        call = self._call
        if call is None or not self._goes(tensor):
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
                call.going.append(copy)
        if not call.copies:
            call.before, self._latest = self._latest, weakref.ref(call)
        call.copies[key] = weakref.ref(copy)
        return _Offloaded(tensor, copy=copy, call=call, offload=self)

    def _goes(self, tensor: Tensor) -> bool:
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
        """The tensor again, for autograd."""
        if not saved.intact:
            where = f" (saved in {saved.call.name})" if isinstance(saved, _Offloaded) else ""
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation" + where
            )
        return saved.tensor()

    def fetch(self, copy: "_Copy", *, call: "_Call") -> Tensor:
        """The bytes of a copy on the device; the calls that backward comes to next are started on their way."""
        self._come_to(call)
        if copy.present is None:
            self._bring([copy])
        self._settle(copy)
        assert copy.present is not None
        return copy.present

    def _come_to(self, call: "_Call") -> None:
        task = torch._C._current_graph_task_id()
        if task in (-1, call.task):
            return
        call.task = task
        if self._in_forward:
            self._in_forward = False
            self._first_in_backward = call.number
            self._going.clear()
        left = self._at() if self._at is not None else None
        self._at = weakref.ref(call)
        if left is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            # Autograd will not drop these.
            for copy in left.saved():
                self._let_go(copy)
        self._bring(call.saved())
        before = call.before() if call.before is not None else None
        if before is not None:
            self._bring(before.saved())

    # Memory

    def _bring(self, copies: "list[_Copy]") -> None:
        """Begin to bring in what is not there; the last saved first, as backward needs it."""
        missing = [copy for copy in reversed(copies) if copy.present is None]
        if not missing:
            return
        self._num_brought += 1
        self._drop_unused(before=self._num_brought - 1)
        hosts = [copy.host for copy in missing if copy.host is not None]
        for copy, (present, event) in zip(missing, self.lane.bring(hosts), strict=True):
            copy.present, copy.event = present, event
            self._coming[id(present)] = (self._num_brought, present, event)

    def _settle(self, copy: "_Copy") -> None:
        """From here on the copy's memory on the device may be read, and given back."""
        if copy.event is not None:
            self.lane.wait(copy.event)
            copy.event = None
            self._coming.pop(id(copy.present), None)

    def _let_go(self, copy: "_Copy") -> None:
        if copy.host is not None:
            self._settle(copy)
            copy.present = None

    def _drop_unused(self, *, before: int) -> None:
        """Memory that was filled for a backward that did not come by."""
        for key, (number, _, event) in list(self._coming.items()):
            if number < before:
                self.lane.wait(event)
                del self._coming[key]


class _Call:
    """One call of a unit, and what it saved. Lives as long as autograd holds some of that."""

    __slots__ = ("__weakref__", "before", "copies", "going", "name", "number", "task")

    def __init__(self, name: str, *, number: int) -> None:
        self.name = name
        self.number = number
        self.before: weakref.ref[_Call] | None = None
        self.copies: dict[tuple[Any, ...], weakref.ref[_Copy]] = {}
        self.going: list[_Copy] = []
        # The backward that has come to it.
        self.task = -1

    def saved(self) -> "list[_Copy]":
        return [copy for copy in (reference() for reference in self.copies.values()) if copy is not None]


class _Copy:
    """The bytes of one storage: on the device (`present`), in host memory, or on the way until `event`."""

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
        # Without the tensor's memory, but with its count of versions.
        self.witness = detach(tensor)
        self.witness.data = torch.empty(0, dtype=tensor.dtype)

    @property
    def intact(self) -> bool:
        return self.witness._version == self.version

    def tensor(self) -> Tensor:
        present = self.offload.fetch(self.copy, call=self.call)
        empty = torch.empty(0, dtype=self.dtype, device=present.device)
        return empty.set_(present.untyped_storage(), self.offset, self.shape, self.stride)
