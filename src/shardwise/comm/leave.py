"""What has to be let go before the process groups are destroyed.

A CUDA graph that holds a collective holds its NCCL communicator, and a communicator is not destroyed until all such
graphs are: with one alive, `destroy_process_group` never returns. So whoever keeps graphs registers them here, and
`torch.distributed.destroy_process_group` lets them go first, whoever calls it.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch.distributed as dist


class Holder(Protocol):
    """Keeps something alive that stands in the way of a group's end."""

    def let_go(self) -> None: ...


_HOLDERS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def let_go_before_leaving(holder: Holder) -> None:
    """Call `holder.let_go()` before groups are destroyed; until then it is not kept alive by this."""
    if not hasattr(dist.destroy_process_group, "_shardwise_lets_go"):
        # Only where there is something to let go: nobody else's process is touched.
        replaced = _letting_go(dist.destroy_process_group)
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = replaced
    _HOLDERS.add(holder)


def let_go() -> None:
    """Let go of all that stands in the way."""
    for holder in list(_HOLDERS):
        holder.let_go()


def _letting_go(destroy: Callable[..., None]) -> Callable[..., None]:
    @wraps(destroy)
    def destroy_process_group(*arguments: Any, **options: Any) -> None:
        let_go()
        destroy(*arguments, **options)

    destroy_process_group._shardwise_lets_go = True  # type: ignore[attr-defined]
    return destroy_process_group
