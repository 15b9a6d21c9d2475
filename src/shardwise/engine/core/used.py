"""Which parameters were used: one that no rank used keeps no gradient, so that the optimizer leaves it alone.

AdamW moves a parameter whose gradient is zero. One flag per parameter is summed over the ranks at the end of a
backward. A rank that used all of its parameters knows the answer without reading it, so that the usual step waits
for nothing on a GPU. Something else may ride along in the first flag (guards/same_order.py).
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import DONE, Work
from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.unit import Unit
from shardwise.program import Kind
from shardwise.program.spec import ROOT


class FlagRider(Protocol):
    """Uses the upper bits of the first flag, `flag`, which is a view of one element.

    send    writes it: whether its parameter was used (0 or 1), and what rides along
    read    takes over the summed flags
    users   returns how many ranks used the parameter of a summed flag
    """

    flag: Tensor

    def send(self, used: int) -> None: ...

    def read(self) -> None: ...

    def users(self, summed: int) -> int: ...


class UsedFlags:
    """The flags of all parameters of a model."""

    def __init__(self, units: Iterable[Unit], *, setting: CoreSetting) -> None:
        self.units = list(units)
        self.groups, self.collectives, self.tape = setting.groups, setting.collectives, setting.tape
        self._device = setting.device
        self._rider: FlagRider | None = None
        self.cover()
        self._name = CollectiveName(f"{Kind.REDUCE_FLAGS.value} {ROOT}")
        self.unused: list[int] = []
        self.work: Work | None = None

    def cover(self) -> None:
        """Make a flag for each parameter that the units hold now."""
        self.places: list[tuple[Unit, FlatParams, int]] = [
            (unit, flat, index) for unit in self.units for flat in unit.flats for index in range(len(flat.params))
        ]
        self.flags: Tensor = torch.ones(len(self.places), dtype=torch.int32, device=self._device)
        if self._rider is not None:
            self._rider.flag = self.flags[:1]

    def carry(self, rider: FlagRider) -> None:
        """Let `rider` use the first flag."""
        self._rider = rider
        rider.flag = self.flags[:1]

    def start(self, *, is_local: bool) -> None:
        """Sum the flags over the ranks; `is_local`: there is only one."""
        self._write()
        if is_local:
            self.work = DONE
        else:
            self.groups.world.log.name = self._name
            self.work = self.collectives.all_reduce(self.flags, group=self.groups.world)
        self.tape.record(Kind.REDUCE_FLAGS, ROOT, lambda: self.flags.nbytes)

    @torch.no_grad()
    def _write(self) -> None:
        self.unused = [] if all(unit.used_all for unit in self.units) else self._unused_here()
        self.flags.fill_(1)
        if self.unused:
            self.flags[self.unused] = 0
        if self._rider is not None:
            self._rider.send(int(0 not in self.unused))
        else:
            for group in self.groups.by_name().values():
                # Nobody compares what was issued.
                group.log.restart()

    def _unused_here(self) -> list[int]:
        return [
            place
            for place, (unit, flat, index) in enumerate(self.places)
            if unit.is_trainable(flat, index) and id(flat.params[index]) not in unit.used
        ]

    def settle(self) -> None:
        """Once the gradients are there: take them from the parameters that no rank used."""
        assert self.work is not None
        self.work.wait()
        rider = self._rider
        if rider is not None:
            rider.read()
        if self.unused:
            for place, summed in zip(self.unused, self.flags[self.unused].tolist(), strict=True):
                if (rider.users(summed) if rider is not None else summed) == 0:
                    _, flat, index = self.places[place]
                    flat.grads.drop_new(index)
        for unit in self.units:
            unit.used.clear()
