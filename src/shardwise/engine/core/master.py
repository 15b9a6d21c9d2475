"""The master: what the optimizer steps, and where it lives.

The owned slice where optim is sharded, else everything. Where params are replicated and compute in the master's dtype
it is not a second copy but a view of the full buffer. It may live in host memory; then it is staged there in the
compute dtype, so that less crosses the bus, and an update of it may still be under way while the next step computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.groups.collectives import Work
from shardwise.engine.core.guests import HostMemory
from shardwise.engine.core.master_writes import MasterWrites
from shardwise.engine.core.parameters import parameter_like


@dataclass(slots=True, kw_only=True)
class Owned:
    """The part of one parameter that this rank's optimizer steps."""

    parameter: nn.Parameter
    index: int
    start: int
    stop: int


class Gathered:
    """What gathers write.

    gathering   the gather that is under way; None: it may be read and written
    """

    gathering: Work | None = None

    def begin(self, gathering: Work) -> None:
        """Wait for this gather, which was issued, before it is read or written."""
        self.gathering = gathering

    def wait(self) -> None:
        """Wait for the gather."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


class Master(Gathered):
    """The master of the parameters of one unit and one dtype.

    aliased       an update of it is an update of the full buffer
    is_separate   it is other memory than the full buffer, as a whole
    staged        what gathers read: a copy of it in another dtype, or itself; where ranks of the replicate axis own
                  parts of one slice, all of that slice, in which `place` is this rank's part
    owned         the parts that the optimizer steps: 1-D views of the slice, or whole parameters
    writes        what somebody else wrote into it, or into copies of it
    gathering     the gather of that slice, once each rank has written its part
    update        the update that is writing it in host memory, if any; `in_use`: what that reads meanwhile
    """

    def __init__(
        self,
        values: Tensor,
        *,
        staged: Tensor | None,
        place: Tensor | None = None,
        aliased: bool,
        is_separate: bool,
        host: HostMemory | None,
    ) -> None:
        self._values = values
        self.staged = values if staged is None else staged
        self._place = self.staged if place is None else place
        self.aliased, self.is_separate = aliased, is_separate
        self.host = host
        self.owned: list[Owned] = []
        self.writes = MasterWrites(values)
        self.update: Any = None
        self.in_use: Sequence[Tensor] | None = None

    def own(self, params: Sequence[nn.Parameter], parts: Sequence[tuple[int, int, int]], *, in_shape: bool) -> None:
        """Have the optimizer step these parts: (parameter, start, stop); `in_shape`: whole parameters.

        Where the master is the full buffer, those are the module's own parameters.
        """
        views = [self._values[start:stop] for _, start, stop in parts]
        self.owned = [
            Owned(
                parameter=parameter_like(params[index], view.view(params[index].shape) if in_shape else view)
                if self.is_separate
                else params[index],
                index=index,
                start=start,
                stop=stop,
            )
            for (index, start, stop), view in zip(parts, views, strict=True)
        ]

    def step_instead(self, index: int, parameter: nn.Parameter) -> None:
        """Have the optimizer step the module's parameter, which is a new one, where that is what it steps."""
        if not self.is_separate:
            self.owned[index].parameter = parameter

    @property
    def values(self) -> Tensor:
        """The master; an update that is still writing it is waited for."""
        self.settle()
        return self._values

    @property
    def unsettled(self) -> Tensor:
        """The master, without a wait: for the copies of updates, which are in order among themselves."""
        return self._values

    @property
    def is_staged(self) -> bool:
        """Return whether gathers read a copy of it in another dtype."""
        return self._place is not self._values

    @property
    def has_grads(self) -> bool:
        return any(part.parameter.grad is not None for part in self.owned)

    def stage(self) -> None:
        """Copy the changed master to where gathers read it, if that is other memory; an update under way does it."""
        if self.is_staged and self.update is None:
            with torch.no_grad():
                self._place.copy_(self._values)

    # Updates that pass through the device (optimizer/streamed_update.py)

    @property
    def passes_through_device(self) -> bool:
        """Return whether it lives in host memory, and the device computes its update."""
        return self.host is not None and self.host.keeps_grads

    def be_written_by(self, update: Any, *, reads: Sequence[Tensor] | None = None) -> None:
        """Note the update that is writing it; None: none. `reads` is held until the next gather has waited for it."""
        self.update, self.in_use = update, reads

    def was_read(self) -> None:
        """The device has waited for the update: what that has read may be used again."""
        self.in_use = None

    def settle(self) -> None:
        """Wait until an update that passes through the device has written host memory."""
        if self.update is not None:
            assert self.host is not None
            self.host.settle(self.update)
            self.be_written_by(None)

    def discard(self) -> None:
        """Give the memory back: the parameters lie in other buffers now."""
        self.settle()
        self.wait()
        self._values = self.staged = self._place = self._values.new_empty(0)
        self.writes = MasterWrites(self._values)
        self.owned = []
