"""What a device adds to the tensors of a step, and how it hands out memory. Every number says where it is from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """How memory is handed out on a kind of device.

    block_bytes            every allocation is rounded up to a multiple of this
    workspace_bytes        what matrix products keep for themselves from their first use on
    keeps_reduce_buffers   a replicated bucket's buffer is used again in the next step, and stays between
    sums_in_blocks         a sum over rows takes memory for the sums of its thread blocks (column_sum.py)
    steps_on_device        the optimizer's step counters, one per parameter, lie on the device
    random_state_bytes     what a recomputed unit keeps of the random numbers
    """

    block_bytes: int = 1
    workspace_bytes: int = 0
    keeps_reduce_buffers: bool = False
    sums_in_blocks: bool = False
    steps_on_device: bool = True
    random_state_bytes: int = 0


RULES: Mapping[str, MemoryRules] = MappingProxyType(
    {
        # kMinBlockSize of c10/cuda/CUDACachingAllocator.h. cuBLAS: aten/src/ATen/cuda/CublasHandlePool.cpp gives every
        # pair of handle and stream 32 MiB on compute capability 9.0; forward and backward run on two threads, and so
        # on two handles.
        "cuda": MemoryRules(block_bytes=512, workspace_bytes=2 * 32 * _MIB, sums_in_blocks=True),
        # engine/core/bucket.py keeps buffers on a CPU. torch.get_rng_state() of the CPU's own generator.
        "cpu": MemoryRules(keeps_reduce_buffers=True, random_state_bytes=5056),
    }
)
"""By kind of device."""

DEFAULT_CONTEXT_BYTES = 552_402_944
"""What a CUDA process holds before its first tensor, where the device table does not say: measured on one H200, torch
2.11 with CUDA 13."""

KERNEL_BYTES = 245 * _MIB
"""What the kernels of a training step take when they have been loaded; measured as above, 225 to 320 MiB with the
operations that a model uses."""

FIRST_COMMUNICATOR_BYTES = 585_105_408
"""What the first NCCL communicator of a process holds outside the allocator; measured as above, with one rank."""

DEFAULT_COMMUNICATOR_BYTES = 406_847_488
"""What each further one holds, where the device table does not say; measured as above."""
