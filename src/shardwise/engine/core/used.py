"""Which parameters were used: one that no rank used keeps no gradient, so that the optimizer leaves it alone.

AdamW moves a parameter whose gradient is zero. One flag a parameter is summed over the ranks at the end of a
backward. A rank that used all of its parameters knows the answer without reading it, so that the usual step waits
for nothing on a GPU. What the ranks have issued is compared along with them (same_order.py).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.comm.collectives import Collectives, Work
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import CollectiveName
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.core.tape import Tape
from shardwise.engine.core.unit import Unit
from shardwise.engine.guards.same_order import SameOrder
from shardwise.program import Kind
from shardwise.spec import ROOT


class UsedFlags:
    """The flags of all parameters of a model."""

    def __init__(
        self,
        units: Iterable[Unit],
        *,
        device: torch.device,
        groups: MeshGroups,
        collectives: Collectives,
        tape: Tape,
        passes: PassState,
    ) -> None:
        self.units = list(units)
        self.groups = groups
        self.collectives = collectives
        self.tape = tape
        self._device = device
        self.same_order = SameOrder(groups=groups, passes=passes)
        self.cover()
        self._name = CollectiveName(f"{Kind.REDUCE_FLAGS.value} {ROOT}")
        self.unused: list[int] = []
        self.work: Work | None = None

    def cover(self) -> None:
        """A flag for each parameter that the units hold now."""
        self.places: list[tuple[Unit, FlatParams, int]] = [
            (unit, flat, index) for unit in self.units for flat in unit.flats for index in range(len(flat.params))
        ]
        self.flags: Tensor = torch.ones(len(self.places), dtype=torch.int32, device=self._device)
        self.same_order.flag = self.flags[:1]

    @torch.no_grad()
    def start(self) -> None:
        """Sum the flags over the ranks."""
        self.unused = [] if all(unit.used_all for unit in self.units) else self._unused_here()
        self.flags.fill_(1)
        if self.unused:
            self.flags[self.unused] = 0
        self.same_order.send(int(0 not in self.unused))
        self.groups.reduce_world.log.name = self._name
        self.work = self.collectives.all_reduce(self.flags, group=self.groups.reduce_world)
        self.tape.record(Kind.REDUCE_FLAGS, ROOT, lambda: self.flags.nbytes)

    def _unused_here(self) -> list[int]:
        return [
            place
            for place, (unit, flat, index) in enumerate(self.places)
            if unit.is_trainable(flat, index) and id(flat.params[index]) not in unit.used
        ]

    def settle(self) -> None:
        """Once the gradients are there: take them from the parameters that no rank used.

        Refuses gradients of ranks that have issued different collectives.
        """
        assert self.work is not None
        self.work.wait()
        self.same_order.read()
        if self.unused:
            for place, summed in zip(self.unused, self.flags[self.unused].tolist(), strict=True):
                if self.same_order.users(summed) == 0:
                    _, flat, index = self.places[place]
                    flat.drop_new_grad(index)
        for unit in self.units:
            unit.used.clear()
