"""Records and replays graphs on a CUDA device. Their memory comes from one pool (step_pool.py)."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardwise.engine.activations.recompute import without_random_numbers
from shardwise.engine.graphs.graph_fills import fill_by_kernels
from shardwise.engine.graphs.reads import NotCaptured, in_one_line
from shardwise.engine.graphs.static_place import StaticPlace, uninitialised
from shardwise.engine.graphs.step_device import StepDevice
from shardwise.engine.graphs.step_pool import StepPool
from shardwise.vocabulary.collection import without_collection

Result = TypeVar("Result")


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

    def lacks_memory(self) -> str:
        """Return why there is too little memory for more graphs; "" if there is enough."""

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
        self._device = StepDevice(device)
        self._generator = torch.cuda.default_generators[self._device.stream.device_index]
        self._pool: StepPool | None = None
        self.settle = self._device.settle
        self.free_share = self._device.free_share
        self.lacks_memory = self._device.lacks_memory
        self.release_memory = self._device.release_memory

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

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device.device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device.device)

    def begin_recordings(self, *, num_bytes: int) -> None:
        if self._pool is None:
            self._pool = StepPool(self._device.stream)
        if not num_bytes:
            return
        self._device.release_memory()
        try:
            # Freed at once. Tensors of graphs are cut from it; in memory of many pieces they would leave gaps.
            self.allocate(num_bytes, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            # Then in pieces.
            self._device.release_memory()

    def renew(self) -> None:
        if self._pool is not None:
            self._pool.renew()

    def record(self, compute: Callable[[], Result]) -> tuple[Graph, Result]:
        assert self._pool is not None
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        random_state = self._generator.clone_state()
        stream = self._device.stream
        stream.wait_stream(torch.cuda.current_stream(self._device.device))
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
            torch.cuda.current_stream(self._device.device).wait_stream(stream)
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
                with torch.cuda.stream(self._device.stream):
                    graph.capture_end()
            except RuntimeError:
                # The error of the failed capture, again.
                self._pool.abort()
        graph.reset()

    def allocate(self, num_elements: int, *, dtype: torch.dtype) -> Tensor:
        assert self._pool is not None
        # Blocks of a pool belong to a stream; those of graphs to the one on which they are recorded.
        with torch.cuda.stream(self._device.stream):
            self._pool.begin()
            try:
                return uninitialised((num_elements,), (1,), dtype=dtype, device=self._device.device)
            finally:
                self._pool.end()

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
