"""A GraphDevice on the CPU: records the operations of a function, and runs them again on the same tensors.

It is adversarial where a GPU is merely fast: a recording computes nothing that could be read, and each replay fills
all graph memory with NaN that was free when the graph was recorded, as if the graph had been given all of it. Parameters
are gathered at other addresses now and then.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine import engine as engine_module
from shardwise.engine.activations.recompute import without_random_numbers
from shardwise.engine.core.core import Core
from shardwise.engine.graphs import unit_graphs as unit_graphs_module
from shardwise.engine.graphs.not_captured import NotCaptured, in_one_line
from shardwise.engine.graphs.static_place import StaticPlace
from shardwise.engine.graphs.traced_unit import TracedUnit
from shardwise.engine.graphs.unit_graphs import UnitGraphs

# Share of the times at which a unit's parameters are elsewhere.
_MOVED = 0.05
# They give a value of the device to Python, which ends a recording.
_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
# They change the form of a tensor, not its memory.
_FORMS = ("t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "set_")


class _Recorder(TorchDispatchMode):
    """Runs and records each operation. What was there before is restored: a recording computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        # (function, arguments, options, the tensors among both, results)
        self.operations: list[tuple[Any, Any, Any, tuple[Tensor, ...], list[Any]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS and not _is_on_host(args[0]):
            raise NotCaptured("it reads a value")
        # Each with its form at this time, which another operation may change.
        given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self._made:
                self._before.setdefault(leaf.untyped_storage().data_ptr(), (leaf.detach(), leaf.detach().clone()))
        outputs = func(*args, **kwargs)
        self._made |= {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
        if "empty" in func.__name__:
            # It is computed with here, and indices must be valid.
            outputs.zero_()
        elif func.overloadpacket.__name__ not in _FORMS:
            tensors = tuple(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            self.operations.append((func, *given, tensors, tree_leaves(tree_map_only(Tensor, Tensor.detach, outputs))))
        return outputs

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self._before.values():
            if 0 not in tensor.stride() and not torch.equal(tensor, value):
                tensor.data.copy_(value)


class SimulatedGraph:
    def __init__(self, operations: list[Any], poisoned: list[Tensor]) -> None:
        self.operations = operations
        self.poisoned = poisoned

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, tensors, outputs in self.operations:
            # Autograd does not see a graph write; inference tensors count none.
            counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
            with torch.autograd._unsafe_preserve_version_counter(counted):
                found = func(*args, **kwargs)
            for old, new in zip(outputs, (found,) if isinstance(found, Tensor) else tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr() and 0 not in old.stride():
                    old.data.copy_(new)
        for tensor in self.poisoned:
            _poison(tensor)

    def reset(self) -> None:
        self.operations, self.poisoned = [], []


@torch.no_grad()
def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() and 0 not in tensor.stride():
        tensor.data.fill_(float("nan"))


class SimulatedGraphs:
    """The device of one arena. The memory of a place is free once nobody owns it."""

    def __init__(self) -> None:
        self.num_recorded = self.num_renewed = 0
        self._places: weakref.WeakSet[StaticPlace] = weakref.WeakSet()
        # Keeps all memory: a dangling address would end the process instead of failing a test.
        self._storages: list[Any] = []
        self._graphs: weakref.WeakSet[SimulatedGraph] = weakref.WeakSet()

    def record(self, compute: Callable[[], Any]) -> tuple[SimulatedGraph, Any]:
        # A gradient may be the one that backward was given, in the same memory.
        owned = {place.pointer for place in self._places if place.owner is not None}
        free = [place.tensor for place in self._places if place.pointer not in owned]
        state = torch.get_rng_state()
        recorder = _Recorder()
        try:
            with torch.compiler.set_stance("fail_on_recompile"), recorder, without_random_numbers(), _no_reads():
                result = compute()
        except RuntimeError as error:
            raise NotCaptured(in_one_line(error)) from error
        finally:
            torch.set_rng_state(state)
            recorder.restore()
        self.num_recorded += 1
        graph = SimulatedGraph(recorder.operations, free)
        self._graphs.add(graph)
        return graph, result

    def allocate(self, num_elements: int, *, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(num_elements, dtype=dtype)
        for graph in self._graphs:
            graph.poisoned.append(tensor.detach())
        return tensor

    def place(self, tensor: Tensor) -> StaticPlace:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        bare = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
        with torch.inference_mode(mode=False):
            alias = torch.empty(0, dtype=tensor.dtype)
            alias.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())
        if all(place.pointer != alias.data_ptr() for place in self._places):
            _poison(alias)
        place = StaticPlace(alias, owner=tensor.detach())
        self._places.add(place)
        return place

    def random_state(self) -> Any:
        return torch.get_rng_state().numpy().tobytes()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def is_on_host(self, tensor: Tensor) -> bool:
        return _is_on_host(tensor)

    def has_room(self) -> bool:
        return True

    def free_share(self) -> float:
        return 1.0

    def settle(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def release_memory(self) -> None:
        pass

    def begin_recordings(self, *, num_bytes: int) -> None:
        pass

    def renew(self) -> None:
        self.num_renewed += 1


@contextmanager
def _no_reads() -> Iterator[None]:
    """Refuse what reads values on a CPU without an operation; on a GPU it would end the recording."""

    def refusing(own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            if _is_on_host(tensor):
                return own(tensor)
            raise NotCaptured("it reads a value")

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, refusing(getattr(Tensor, name)))
        yield


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is what numbers of Python that vary become in a trace."""
    return tensor.dim() == 0 and tensor.dtype == torch.float64 and not tensor.requires_grad


@contextmanager
def simulated(*, at_once: bool = False, moved: float = _MOVED) -> Iterator[list[str]]:
    """Give models that are prepared inside this block simulated graphs; yields the lines that they tell the user.

    at_once   of every form that they see
    moved     share of the times at which a unit's parameters seem to have been gathered elsewhere, so that a forward is
              an ordinary one, or a backward computes it again
    """
    enough = unit_graphs_module.ENOUGH
    unit_graphs_module.ENOUGH = (0, 0) if at_once else enough
    lines: list[str] = []
    addresses, make = TracedUnit.addresses, engine_module.unit_graphs_of

    def unit_graphs_of(core: Core, *, optimizers: Any) -> UnitGraphs | None:
        if core.followed.plan.offload_activations:
            return None
        return UnitGraphs(core, make_device=SimulatedGraphs, tell=lines.append, optimizers=optimizers)

    drawn = Random(0)

    def simulated_addresses(unit: TracedUnit, params: Sequence[Tensor]) -> list[int]:
        # The recorded operations hold the parameters themselves, wherever these are: an expert's are not another's.
        return [*(id(one) for one in params if isinstance(one, nn.Parameter)), drawn.random() < moved]

    TracedUnit.addresses = simulated_addresses  # type: ignore[method-assign]
    engine_module.unit_graphs_of = unit_graphs_of
    try:
        yield lines
    finally:
        TracedUnit.addresses = addresses  # type: ignore[method-assign]
        engine_module.unit_graphs_of = make
        unit_graphs_module.ENOUGH = enough
