"""Releases CUDA graphs before process groups are destroyed.

A CUDA graph with a collective in it holds the NCCL communicator, and while one is alive `destroy_process_group` never
returns. So a holder of graphs registers here, and `torch.distributed.destroy_process_group` releases it first.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch.distributed as dist


class Holder(Protocol):
    """An object that keeps CUDA graphs alive."""

    def release(self) -> None: ...


_HOLDERS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def release_before_leaving(holder: Holder) -> None:
    """Call `holder.release()` before groups are destroyed. This does not keep the holder alive."""
    if not hasattr(dist.destroy_process_group, "_shardwise_releases"):
        # Patched only once there is something to release.
        patched = _releasing(dist.destroy_process_group)
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = patched
    _HOLDERS.add(holder)


def _releasing(destroy: Callable[..., None]) -> Callable[..., None]:
    @wraps(destroy)
    def destroy_process_group(*arguments: Any, **options: Any) -> None:
        for holder in list(_HOLDERS):
            holder.release()
        destroy(*arguments, **options)

    destroy_process_group._shardwise_releases = True  # type: ignore[attr-defined]
    return destroy_process_group
