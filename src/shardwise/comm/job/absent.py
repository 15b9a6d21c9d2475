"""A rehearsal: one rank of a large job, with the other ranks absent. Real memory, real compute, no communication.

    with absent_group(64):
        model, optimizer = prepare(model, optimizer, plan, collectives=AbsentCollectives())
        …an ordinary loop…

Values are wrong, because this rank's own data stand in for what the others would send. Memory is right, because which
bytes are live does not depend on values.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.base.errors import InvalidPlan
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import HashStore, Store
from shardwise.comm.groups.collectives import DONE, Work, own_slice
from shardwise.comm.groups.groups import Group
from shardwise.plan.placement import Mesh

# Without its lowest bit no byte is NaN in fp8, nor the upper one of a NaN in bf16.
_NO_NAN = 0xFE


class AbsentCollectives:
    """Collectives in which every other rank sends what this one has.

    None of them allocates. `all_gather` and `all_to_all` copy bytes, since an engine must find its buffer written to.
    Bytes of weights in fp8 and bf16 may come to lie where the other dtype is read. They are kept from becoming NaN, so
    that losses stay finite and kernels multiply numbers.
    """

    @torch.no_grad()
    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """Copy this rank's slice over all others: one copy, or two if there are slices on both sides."""
        own = own_slice(buffer, group=group) if own is None else own
        slices = buffer.view(group.size, own.numel())
        for others in (slices[: group.index], slices[group.index + 1 :]):
            if not len(others):
                continue
            if own.dtype is torch.uint8:
                torch.bitwise_and(own.expand_as(others), _NO_NAN, out=others)
            else:
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
        self, received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
    ) -> Work:
        """Copy as much of `sent` as fits, and fill the rest with zeros."""
        size = min(received.numel(), sent.numel())
        received[:size].copy_(sent[:size])
        received[size:].zero_()
        return DONE


@contextmanager
def absent_group(num_ranks: int, *, rank: int = 0, store: Store | None = None) -> Iterator[None]:
    """Be one rank of a job of `num_ranks` whose other ranks do not exist, or do not communicate.

    The process group is torch's fake backend: its collectives return at once, and gathering objects gives every rank
    this rank's object. `fully_shard` works on it unchanged, DDP after `leave_out_reduce`. A call that needs the other
    ranks, such as `state_dict`, reports them missing, unless they join the same `store`.
    """
    Mesh(shard=num_ranks)
    if dist.is_initialized():
        raise InvalidPlan("a process group is there already: a rehearsal needs a process that has joined no job")
    # The backend is registered by the import of the file that has it.
    torch_private.need("FakeStore")
    # A real store, in which the other ranks never write.
    dist.init_process_group("fake", store=store or HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave_out_reduce(model: nn.Module) -> None:
    """Make every DDP module in the model use its own gradients as the sum: the fake backend returns no tensor."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, noop_hook)
