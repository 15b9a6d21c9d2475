"""A rehearsal: one rank of a job of many, with the others absent. Real memory, real compute, no wire.

    with absent_group(64):
        model, optimizer = prepare(model, optimizer, plan, collectives=AbsentCollectives())
        …an ordinary loop…

The values are not those of training: what others would send is made up of this rank's own. The memory is: which
bytes are live when does not depend on values.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collectives import DONE, Work, own_slice
from shardwise.comm.groups import Group
from shardwise.errors import InvalidPlan
from shardwise.plan.mesh import Mesh


class AbsentCollectives:
    """Collectives in which every other rank would have sent what this one has.

    None of them allocates; `all_gather` and `all_to_all` move bytes, since an engine must find its buffer written to.
    """

    @torch.no_grad()
    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """Tiles this rank's slice over the others: one copy, two where slices lie on both sides of it."""
        own = own_slice(buffer, group=group) if own is None else own
        slices = buffer.view(group.size, own.numel())
        for others in (slices[: group.index], slices[group.index + 1 :]):
            if len(others):
                others.copy_(own.expand_as(others))
        return DONE

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return DONE

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        return DONE

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        return DONE

    @torch.no_grad()
    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        """As much as this rank has of its own."""
        size = min(received.numel(), sent.numel())
        received[:size].copy_(sent[:size])
        received[size:].zero_()
        return DONE


@contextmanager
def absent_group(num_ranks: int, *, rank: int = 0, store: Store | None = None) -> Iterator[None]:
    """Be one rank of a job of `num_ranks` whose other ranks do not exist, or are not to be heard.

    torch's own fake backend stands for the process group: its collectives return at once, and of what is gathered
    as objects every rank has this one's. `fully_shard` runs on it as it is, DDP after `leave_out_reduce`. What needs
    the others to come, such as `state_dict`, says that they did not, unless they come to the same `store`.
    """
    Mesh(shard=num_ranks)
    if dist.is_initialized():
        raise InvalidPlan("a process group is there already: a rehearsal needs a process that has joined no job")
    # To import it is to register the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    # A real store; in one of our own the others never leave a sign.
    dist.init_process_group("fake", store=store or HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave_out_reduce(model: nn.Module) -> None:
    """Let torch's DDP take its own gradients for the sum: it wants a tensor back, and the fake backend has none.

    Wherever in the model it is: what is built on torch's engines may put more around it.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, noop_hook)
