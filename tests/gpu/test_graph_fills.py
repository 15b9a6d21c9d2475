"""Small memsets of a recorded graph run as kernels, and fill what they filled."""

import ctypes

import pytest
import torch
from torch import Tensor

from shardwise.engine.graphs.graph_fills import fill_by_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def memset(place: Tensor, value: int) -> None:
    """As libraries do it: by elements of 1, 2 or 4 bytes."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), f"cuMemsetD{8 * place.element_size()}Async")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    count = ctypes.c_size_t(place.numel())
    assert function(ctypes.c_uint64(place.data_ptr()), ctypes.c_uint32(value), count, stream) == 0


def recorded(place: Tensor, value: int) -> torch.cuda.CUDAGraph:
    """A graph in which elements are set, and one is added to each."""
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        place.add_(1)
        memset(place, value)
        place.add_(1)
        graph.capture_end()
    return graph


@pytest.mark.parametrize("num_elements", [4, 1020, 1024, 1028, 2**18])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_a_small_one_is_replaced_and_fills_all_of_its_tensor(dtype: torch.dtype, num_elements: int) -> None:
    around = torch.full((num_elements + 8,), 7, dtype=dtype, device="cuda")
    place = around[4:-4]
    graph = recorded(place, 42)
    assert fill_by_kernels(graph) == 1
    graph.instantiate()
    for _ in range(2):
        place.fill_(5)
        graph.replay()
        assert place.eq(43).all()
        assert around[:4].eq(7).all()
        assert around[-4:].eq(7).all()
    assert fill_by_kernels(graph) == 0


@pytest.mark.parametrize("place", [slice(0, 2**21), slice(1, 5), slice(0, 3)])
def test_what_is_large_or_not_of_whole_words_stays(place: slice) -> None:
    tensor = torch.full((2**21,), 7, dtype=torch.uint8, device="cuda")
    graph = recorded(tensor[place], 42)
    assert fill_by_kernels(graph) == 0
    graph.replay()
    assert tensor[place].eq(43).all()
