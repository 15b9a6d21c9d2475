"""Records and replays graphs on a CUDA device. Their memory comes from one pool (graph_pool.py)."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardwise.base.vocabulary.collection import without_collection
from shardwise.engine.activations.recompute import without_random_numbers
from shardwise.engine.graphs.graph_fills import fill_by_kernels
from shardwise.engine.graphs.graph_pool import GraphPool
from shardwise.engine.graphs.not_captured import NotCaptured, in_one_line
from shardwise.engine.graphs.static_place import StaticPlace, uninitialised

Result = TypeVar("Result")

FULL = 0.1
"""A device counts as full if less than this share of its memory is free."""

# Memory that the driver uses for graphs.
_GRAPH_BYTES = 256 * 2**20


class Graph(Protocol):
    """Recorded operations."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


class GraphDevice(Protocol):
    """A device that can record operations, and run them again at the same addresses."""

    def record(self, compute: Callable[[], Result]) -> tuple[Graph, Result]:
        """Record what `compute` does, without computing it; tensors that it makes lie in the graphs' memory.

        Raises NotCaptured; then nothing was recorded.
        """

    def allocate(self, num_elements: int, *, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory that was free when earlier graphs were recorded, or that they use."""

    def place(self, tensor: Tensor) -> StaticPlace:
        """Return the place of a tensor that was made in a recording, or allocated."""

    def random_state(self) -> Any:
        """Return the state of the device's random generator, as a value that can be compared."""

    def set_random_state(self, state: Any) -> None: ...

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory, which graphs neither read nor write."""

    def has_room(self) -> bool:
        """Return whether there is room for the driver's data of more graphs."""

    def free_share(self) -> float:
        """Return the share of the device's memory that is free."""

    def settle(self) -> None:
        """Wait until the device has done everything."""

    def allocated_bytes(self) -> int:
        """Return the size of all tensors on the device."""

    def reserved_bytes(self) -> int:
        """Return the memory that the allocator has taken from the device."""

    def release_memory(self) -> None:
        """Return unused memory of the allocator to the device."""

    def begin_recordings(self, *, num_bytes: int) -> None:
        """Prepare for recordings; free unused memory and reserve as much for them in one piece, if any."""

    def renew(self) -> None:
        """Give the graphs' memory back: there are no graphs any more."""


class CudaGraphs:
    """The GraphDevice of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Graphs are recorded on it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[self._stream.device_index]
        self._pool: GraphPool | None = None

    def random_state(self) -> tuple[int, int]:
        """Return the generator's seed, which may be set between a forward and its backward, and its offset."""
        return self._generator.initial_seed(), self._generator.get_offset()

    def set_random_state(self, state: tuple[int, int]) -> None:
        seed, offset = state
        if self._generator.initial_seed() != seed:
            self._generator.manual_seed(seed)
        self._generator.set_offset(offset)

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cuda"

    def has_room(self) -> bool:
        if torch.cuda.mem_get_info(self._device)[0] < _GRAPH_BYTES:
            self.release_memory()
        return torch.cuda.mem_get_info(self._device)[0] >= _GRAPH_BYTES

    def free_share(self) -> float:
        free_bytes, device_bytes = torch.cuda.mem_get_info(self._device)
        return free_bytes / device_bytes

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release_memory(self) -> None:
        self.settle()
        torch.cuda.empty_cache()

    def begin_recordings(self, *, num_bytes: int) -> None:
        if self._pool is None:
            self._pool = GraphPool(self._stream)
        if not num_bytes:
            return
        self.release_memory()
        try:
            # Freed at once. Tensors of graphs are cut from it; in memory of many pieces they would leave gaps.
            self.allocate(num_bytes, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            # Then in pieces.
            self.release_memory()

    def renew(self) -> None:
        if self._pool is not None:
            self._pool.renew()

    def record(self, compute: Callable[[], Result]) -> tuple[Graph, Result]:
        assert self._pool is not None
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        random_state = self._generator.clone_state()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begun = False
        try:
            with (
                torch.cuda.stream(stream),
                without_random_numbers(),
                # A cycle may hold a pool of memory, which cannot be freed during a capture.
                without_collection(),
                torch.compiler.set_stance("fail_on_recompile"),
                warnings.catch_warnings(),
            ):
                # Such as one of views alone.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                # In inference mode the first capture would make an inference tensor of the random seed, which no replay
                # outside of it could write. thread_local: the backend's threads may query the device meanwhile.
                with torch.inference_mode(mode=False):
                    graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
                begun = True
                result = compute()
                graph.capture_end()
            # At its beginning a capture writes the seed and the offset of random numbers, on its stream. Replays set
            # them on the current one, which may still wait for other ranks, and must not be overtaken.
            torch.cuda.current_stream(self._device).wait_stream(stream)
            fill_by_kernels(graph)
            graph.instantiate()
        except (NotCaptured, RuntimeError) as error:
            self._abort(graph, begun=begun)
            # After a failed capture the device's generator still waits for its end, and could not draw numbers.
            self._generator.graphsafe_set_state(random_state)
            raise NotCaptured(in_one_line(error)) from error
        except BaseException:
            # Ctrl-C must not leave a stream that is being captured.
            self._abort(graph, begun=begun)
            self._generator.graphsafe_set_state(random_state)
            raise
        return graph, result

    def _abort(self, graph: Any, *, begun: bool) -> None:
        assert self._pool is not None
        if begun:
            try:
                with torch.cuda.stream(self._stream):
                    graph.capture_end()
            except RuntimeError:
                # The error of the failed capture, again.
                self._pool.abort()
        graph.reset()

    def allocate(self, num_elements: int, *, dtype: torch.dtype) -> Tensor:
        assert self._pool is not None
        with self._pool.filling():
            return uninitialised((num_elements,), (1,), dtype=dtype, device=self._device)

    def place(self, tensor: Tensor) -> StaticPlace:
        return StaticPlace(_alias(tensor, keeper=self._pool), owner=tensor.detach())


class _Memory:
    """Bytes of the device. A storage of them keeps this object, and with it the pool, but not the allocator's block."""

    def __init__(self, pointer: int, num_bytes: int, keeper: Any) -> None:
        self.keeper = keeper
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def _alias(tensor: Tensor, *, keeper: Any) -> Tensor:
    """Return a tensor at the same address that does not keep the memory in use."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(mode=False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if not storage.nbytes():
            return made.resize_(tensor.shape)
        whole = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes(), keeper), device=tensor.device)
        assert whole.data_ptr() == storage.data_ptr()
        return made.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
