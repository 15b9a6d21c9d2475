"""Releases CUDA graphs before process groups are destroyed.

A CUDA graph with a collective in it holds the NCCL communicator, and while one is alive `destroy_process_group` never
returns. So a holder of graphs registers here, and `torch.distributed.destroy_process_group` releases it first.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from shardwise.base.vocabulary.while_alive import WhileAlive, replaced


class Holder(Protocol):
    """An object that keeps CUDA graphs alive."""

    def release(self) -> None: ...


def release_before_leaving(holder: Holder) -> None:
    """Call `holder.release()` before groups are destroyed. This does not keep the holder alive."""
    _HOLDERS.add(holder)


def _release_first(destroy: Callable[..., None], *arguments: Any, **options: Any) -> None:
    for holder in _HOLDERS:
        holder.release()
    destroy(*arguments, **options)


_HOLDERS: WhileAlive[Holder] = WhileAlive(
    replaced(dist, "destroy_process_group", _release_first),
    replaced(dist.distributed_c10d, "destroy_process_group", _release_first),
)
