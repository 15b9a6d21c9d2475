"""Training on plain tensors: gather, compute, reduce, update. The first file to read.

A step is a program: one row of operations per event. Here an operation is a method, and ends before the next begins.
What a rank does not own becomes NaN, so that a missing gather shows. On two ranks the engine trains to the same bits.
"""

from collections.abc import Callable, Iterator
from functools import partial, partialmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program import Trigger, build
from shardwise.program.spec import ROOT
from shardwise.program.units import model_spec, unit_modules


class NaiveExecutor:
    """Trains a model that calls its units in the order of registration, uses all parameters, and computes in fp32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.mesh, self.rank = plan.mesh or Mesh(shard=dist.get_world_size()), dist.get_rank()
        spec = model_spec(model, policy=plan.units)
        self.params = {u.name: [model.get_parameter(p.name) for p in u.params if p.trainable] for u in spec.units}
        self.build = partial(build, spec, plan=plan, mesh=self.mesh)
        # The pieces of a large unit are reduced together, with the last one.
        self.buckets = {b.name: [p for u in b.units for p in self.params[u]] for b in self.build().buckets if b.is_last}
        for unit, module in unit_modules(model, policy=plan.units).items():
            module.register_forward_pre_hook(partial(self.run_to, Trigger.BEFORE_FORWARD, unit))
            module.register_forward_hook(partial(self.run_to, Trigger.AFTER_FORWARD, unit))
            module.register_full_backward_pre_hook(partial(self.run_to, Trigger.BEFORE_BACKWARD, unit))

    def step(self, *passes: Callable[[nn.Module], Tensor]) -> None:
        """Train on the losses that these functions compute. Their gradients add up, and the last backward reduces."""
        for number, loss_of in enumerate(passes, start=1):
            self.is_last = number == len(passes)
            self.rows = iter(self.build(reduces=self.is_last).rows)
            torch.autograd.backward(loss_of(self.model))
            self.run_to(Trigger.BACKWARD_DONE, ROOT)
        self.run_to(Trigger.AFTER_STEP, ROOT)

    def run_to(self, trigger: Trigger, unit: str, *_: object) -> None:
        """Run the next rows, up to that of an event. Units that backward has left by then have all their gradients."""
        for row in self.rows:
            for operation in row.operations:
                getattr(self, operation.kind.name.lower())(operation.subject)
            if (row.trigger, row.unit) == (trigger, unit):
                return

    def parts(self, unit: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of sharded parameters, each with its owner: this group's, if all groups have one."""
        place, group = self.plan.placement(unit).optim, self.mesh.shard_group(self.rank)
        for parameter in self.params[unit] if place.is_sharded else ():
            for index, part in enumerate(parameter.data.view(-1).tensor_split(self.mesh.shard)):
                owners = self.mesh.replicate_group(index) if place.is_sharded_across else group[index : index + 1]
                yield from zip(owners, part.tensor_split(len(owners)), strict=True)

    def gather(self, unit: str, *, twice: bool = False) -> None:
        for owner, part in self.parts(unit):
            dist.broadcast(part, src=owner if twice else owner % self.mesh.shard)  # To all: the first group, or all.

    def free(self, unit: str, *, twice: bool = False) -> None:
        for owner, part in self.parts(unit):
            if (owner - self.rank) % (self.mesh.num_ranks if twice else self.mesh.shard):
                part.fill_(torch.nan)

    def reduce(self, bucket: str) -> None:
        for parameter in self.buckets.get(bucket, ()) if self.is_last else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(1 / self.mesh.num_ranks)

    def update(self, root: str) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The optimizer has stepped all of a parameter, but only the part that this rank owns counts.
        for unit in self.params:
            self.free(unit, twice=True)

    def broadcast(self, root: str) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    gather_slice, wait_gather_slice = partialmethod(gather, twice=True), free
    # The model computes, autograd keeps gradients, a sum is over all ranks at once, and nothing needs a wait.
    forward = backward = take_grads = wait_gather = wait_reduce = reduce_slice = wait_slice = reduce_flags = bool
