"""Memory of a device beyond the tensors of a step, and its allocation rules. Every number has a source."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Allocation rules of a kind of device.

    block_bytes            every allocation is rounded up to a multiple of this
    workspace_bytes        workspace that matrix products keep after their first use
    keeps_reduce_buffers   a replicated bucket's buffer is kept from step to step
    sums_in_blocks         a column sum allocates scratch memory (stream_peak.py)
    random_state_bytes     random state that a recomputed unit saves
    """

    block_bytes: int = 1
    workspace_bytes: int = 0
    keeps_reduce_buffers: bool = False
    sums_in_blocks: bool = False
    random_state_bytes: int = 0


RULES: Mapping[str, MemoryRules] = MappingProxyType(
    {
        # kMinBlockSize of c10/cuda/CUDACachingAllocator.h. cuBLAS: aten/src/ATen/cuda/CublasHandlePool.cpp gives every
        # pair of handle and stream 32 MiB on compute capability 9.0; forward and backward run on two threads, each
        # with its own handle.
        "cuda": MemoryRules(block_bytes=512, workspace_bytes=2 * 32 * _MIB, sums_in_blocks=True),
        # engine/core/bucket.py keeps buffers on a CPU. torch.get_rng_state() of the CPU's own generator.
        "cpu": MemoryRules(keeps_reduce_buffers=True, random_state_bytes=5056),
    }
)
"""By torch's device type."""

DEFAULT_CONTEXT_BYTES = 552_402_944
"""Memory of a CUDA process before its first tensor, if the device table has no value; measured on one H200, torch 2.11
with CUDA 13."""

KERNEL_BYTES = 245 * _MIB
"""Memory of the loaded kernels of a training step; measured as above, 225 to 320 MiB depending on the model."""

FIRST_COMMUNICATOR_BYTES = 585_105_408
"""Memory of a process's first NCCL communicator outside the allocator; measured as above, with one rank."""

DEFAULT_COMMUNICATOR_BYTES = 406_847_488
"""Memory of each further communicator, if the device table has no value; measured as above."""
