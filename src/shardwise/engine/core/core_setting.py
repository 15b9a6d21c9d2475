"""The setting of a core: what all its parts are made with, and how the user's loop runs the current pass."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.comm.groups.collectives import Collectives
from shardwise.comm.groups.groups import MeshGroups
from shardwise.engine.core.guests import HostMemory, NarrowBuffer, WorkBeside
from shardwise.engine.core.step_events import StepEvents, Tape
from shardwise.plan import Plan
from shardwise.program.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class PassState:
    """The way in which the user's loop runs this pass.

    accumulating   its gradients are one part of a step's
    num_counting   how many ranks have data in it; None: all
    counts         whether this rank has; without, it takes part and adds nothing
    source         the rank whose buffers count
    values_by      the block of code in which no step may run, since parameters have other values or are being read; ""
                   outside of one
    lent           whether they have other memory, too
    by_parts       code that runs backward by itself calls parts of the model, in any order (part_calls.py)
    """

    accumulating: bool = False
    num_counting: int | None = None
    counts: bool = True
    source: int = 0
    values_by: str = ""
    lent: bool = False
    by_parts: bool = False

    def check_values(self, what: str) -> None:
        """Refuse what needs the values of training."""
        if self.values_by:
            raise InvalidModel(f"{what} inside {self.values_by}: do it after the block")

    def check_memory(self, what: str) -> None:
        """Refuse what needs the parameters where they are in a step."""
        if self.lent:
            self.check_values(what)

    def weight(self, *, num_ranks: int) -> float:
        """Return the factor of this rank's gradients with which a sum over all ranks / num_ranks is the average over
        the ranks that count.
        """
        if not self.counts:
            return 0.0
        return 1.0 if self.num_counting is None else num_ranks / self.num_counting


Places = Callable[[str, int, torch.dtype], Tensor | None]
"""Returns memory for gradients by name, size and dtype; None where it has none now."""


class GradientMemory:
    """The allocator's memory, or that of `places`."""

    def __init__(self) -> None:
        self.places: Places | None = None

    def lie_in(self, places: Places | None) -> None:
        """Lie in this memory from now on; None: in the allocator's."""
        self.places = places

    def empty(self, name: str, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory for the gradients of this name."""
        found = self.places(name, num_elements, dtype) if self.places is not None else None
        return torch.empty(num_elements, dtype=dtype, device=device) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSetting:
    """`alignment`: slices begin at multiples of it; `host`: where sharded states live, if not on the device; `beside`:
    what runs while the device computes; `narrow`: makes buffers for weights that are gathered in fewer bits.
    """

    spec: ModelSpec
    plan: Plan
    groups: MeshGroups
    collectives: Collectives
    device: torch.device
    host: HostMemory | None = None
    narrow: Callable[..., NarrowBuffer] | None = None
    alignment: int = ALIGNMENT
    tape: Tape = field(default_factory=Tape)
    events: StepEvents = field(default_factory=StepEvents)
    passes: PassState = field(default_factory=PassState)
    gradient_memory: GradientMemory = field(default_factory=GradientMemory)
    beside: list[WorkBeside] = field(default_factory=list)

    @property
    def update_device(self) -> torch.device | None:
        """The device that updates everything; None where the CPU updates what lives in host memory."""
        return self.device if self.host is None or self.host.keeps_grads else None

    def land(self) -> None:
        """Wait for gradients that are on their way to host memory."""
        if self.host is not None:
            self.host.land()
