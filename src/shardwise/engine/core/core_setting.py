"""The setting of a core: what all its parts are made with."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardwise.comm.collectives import Collectives
from shardwise.comm.groups import MeshGroups
from shardwise.engine.core.gradient_memory import GradientMemory
from shardwise.engine.core.guests import HostMemory, NarrowBuffer, WorkBeside
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.core.step_events import StepEvents
from shardwise.engine.core.tape import Tape
from shardwise.plan import Plan
from shardwise.spec import ModelSpec
from shardwise.vocabulary.layout import ALIGNMENT


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
