"""Replaces the small memsets of a recorded graph by kernels.

Reductions and matrix products reset a few bytes before they run. Inside a CUDA graph the device waits 3 to 14 µs around
each of these memsets, and under 1 µs between two kernels: on an H200 that was 5% of a step of BERT-large.
"""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

# Larger ones are rare and stay memsets: the kernel has one thread per word.
_MOST_BYTES = 2**20
_WORD = 4
_THREADS = 256
_MEMSET = 2
_DONE = 0
_NEEDED = (
    *("cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphAddKernelNode_v2"),
    *("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes", "cuGraphAddDependencies", "cuGraphDestroyNode"),
)
_FILL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry shardwise_fill(.param .u64 place, .param .u32 word, .param .u32 count)
{
    .reg .pred %outside;
    .reg .b32 %r<5>;
    .reg .b64 %address<2>;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r0, %r0, %r1, %r2;
    ld.param.u32 %r3, [count];
    setp.ge.u32 %outside, %r0, %r3;
    @%outside bra done;
    ld.param.u64 %address0, [place];
    cvta.to.global.u64 %address0, %address0;
    mul.wide.u32 %address1, %r0, 4;
    add.s64 %address0, %address0, %address1;
    ld.param.u32 %r4, [word];
    st.global.u32 [%address0], %r4;
done:
    ret;
}
"""


class _Memset(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("place", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint32),
        ("element_bytes", c_uint32),
        ("width", c_size_t),
        ("height", c_size_t),
    )

    @property
    def num_bytes(self) -> int:
        return int(self.width * self.element_bytes)

    @property
    def is_small(self) -> bool:
        """Return whether it is one row of complete words, up to _MOST_BYTES."""
        is_of_words = self.place % _WORD == self.num_bytes % _WORD == 0
        return bool(is_of_words and self.height == 1 and 0 < self.num_bytes <= _MOST_BYTES)

    @property
    def word(self) -> int:
        """The value, repeated to fill a word."""
        element = self.value.to_bytes(_WORD, "little")[: self.element_bytes]
        return int.from_bytes(element * (_WORD // self.element_bytes), "little")


class _Kernel(Structure):
    """CUDA_KERNEL_NODE_PARAMS of CUDA 12."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("arguments", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


def fill_by_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Replace the small memsets of a graph that is recorded and not yet instantiated; return how many.

    They stay where the driver lacks the functions that this needs.
    """
    function = _fill_function(torch.cuda.current_device())
    if function is None:
        return 0
    raw = graph.raw_cuda_graph()
    return sum(_replace(raw, node, memset, function=function) for node, memset in list(_small_memsets(raw)))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _fill_function(device: int) -> c_void_p | None:
    """Return the kernel on the current device; None if there is no such driver, or it does not load the kernel."""
    module, function = c_void_p(), c_void_p()
    try:
        driver = _driver()
    except OSError:
        return None
    if not all(hasattr(driver, name) for name in _NEEDED) or driver.cuModuleLoadData(byref(module), _FILL) != _DONE:
        return None
    _check(_driver().cuModuleGetFunction(byref(function), module, b"shardwise_fill"))
    return function


def _check(result: int) -> None:
    if result != _DONE:
        raise RuntimeError(f"CUDA error {result} while a recorded graph is edited")


def _small_memsets(graph: int) -> Iterator[tuple[int, _Memset]]:
    for node in _listed("cuGraphGetNodes", graph) or ():
        kind = c_int()
        _check(_driver().cuGraphNodeGetType(c_void_p(node), byref(kind)))
        if kind.value == _MEMSET:
            memset = _Memset()
            _check(_driver().cuGraphMemsetNodeGetParams(c_void_p(node), byref(memset)))
            if memset.is_small:
                yield node, memset


def _listed(function: str, of: int) -> list[int] | None:
    """Return the nodes that a function of the driver lists; None if it fails, as it does for edges with data."""
    count = c_size_t()
    if getattr(_driver(), function)(c_void_p(of), None, byref(count)) != _DONE:
        return None
    nodes = (c_void_p * count.value)()
    if count.value and getattr(_driver(), function)(c_void_p(of), nodes, byref(count)) != _DONE:
        return None
    return [node for node in nodes if node is not None]


def _replace(graph: int, node: int, memset: _Memset, *, function: c_void_p) -> bool:
    """Put a kernel where the memset is, between the same nodes."""
    before, after = _listed("cuGraphNodeGetDependencies", node), _listed("cuGraphNodeGetDependentNodes", node)
    if before is None or after is None:
        return False
    count = memset.num_bytes // _WORD
    values = c_uint64(memset.place), c_uint32(memset.word), c_uint32(count)
    arguments = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kernel = _Kernel(
        function=function,
        grid=(-(-count // _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        arguments=arguments,
    )
    made = c_void_p()
    add = _driver().cuGraphAddKernelNode_v2
    _check(add(byref(made), c_void_p(graph), _nodes(before), c_size_t(len(before)), byref(kernel)))
    from_here = _nodes([made.value or 0] * len(after))
    _check(_driver().cuGraphAddDependencies(c_void_p(graph), from_here, _nodes(after), c_size_t(len(after))))
    _check(_driver().cuGraphDestroyNode(c_void_p(node)))
    return True


def _nodes(nodes: list[int]) -> Any:
    return (c_void_p * len(nodes))(*nodes)
