"""What a dial costs by the planner's own replay: bytes on the device, samples per second. No torch.

Replaying a dial takes some milliseconds, whatever its batch; another batch of a dial that was replayed costs next to
nothing. Both are remembered, so a search may ask as often as it likes.
"""

from dataclasses import dataclass, field, replace
from math import inf

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.memory.peak import estimate
from shardwise.planner.search.dial import Choice, Dial, equal_units, plan_of, turned_units
from shardwise.planner.time.step_time import estimate_time
from shardwise.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class DialCosts:
    """The costs of the dials of one model on one cluster. `base`: the plan whose other settings hold.

    names    the units that a dial has choices for, in its order
    classes  positions of those that are equal and follow on each other
    """

    spec: ModelSpec
    base: Plan
    cluster: Cluster
    optimizer: str
    names: tuple[str, ...] = ()
    classes: tuple[range, ...] = ()
    _plans: dict[Dial, Plan] = field(default_factory=dict)
    _bytes: dict[Dial, int] = field(default_factory=dict)
    _seconds: dict[Dial, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = turned_units(self.spec)
        self.classes = tuple(equal_units(self.spec))

    @property
    def band(self) -> float:
        """How far the planner's memory may be off."""
        return engine_model_of(self.base).error_band

    @property
    def num_replays(self) -> int:
        return len(self._plans)

    def plan(self, dial: Dial) -> Plan:
        key = replace(dial, batch=1)
        if key not in self._plans:
            self._plans[key] = plan_of(key, names=self.names, base=self.base)
        return replace(self._plans[key], micro_batch=dial.batch)

    def tensor_bytes(self, dial: Dial) -> int:
        """On the device, without the allocator's model. Passes beyond the second hold what the second holds."""
        if dial not in self._bytes:
            passes = min(dial.accumulate, 2)
            self._bytes[dial] = self._device_bytes(replace(dial, accumulate=passes), limit_bytes=None, quick=True)
        return self._bytes[dial]

    def device_bytes(self, dial: Dial, *, limit_bytes: float) -> int:
        """On the device, with what the caching allocator reserves where it can have no more than `limit_bytes`."""
        limit = None if limit_bytes == inf else round(limit_bytes)
        return self._device_bytes(dial, limit_bytes=limit, quick=False)

    def _device_bytes(self, dial: Dial, *, limit_bytes: int | None, quick: bool) -> int:
        device = self.cluster.device
        return estimate(
            self.spec,
            plan=self.plan(dial),
            num_ranks=self.cluster.num_ranks,
            batch=dial.batch,
            optimizer=self.optimizer,
            device="cpu" if device.name == "cpu" else "cuda",
            context_bytes=device.context_bytes.value if device.context_bytes else None,
            communicator_bytes=device.communicator_bytes.value if device.communicator_bytes else None,
            limit_bytes=limit_bytes,
            quick=quick,
        ).device_bytes

    def speed(self, dial: Dial) -> float:
        """Samples per second of all ranks together."""
        return dial.batch * dial.accumulate * self.cluster.num_ranks / self.step_seconds(dial)

    def step_seconds(self, dial: Dial) -> float:
        if dial not in self._seconds:
            self._seconds[dial] = self._timed(dial)
        return self._seconds[dial]

    def _timed(self, dial: Dial) -> float:
        if dial.accumulate > 3:
            # Each further pass takes as long as the one in the middle of three.
            two, three = (self.step_seconds(replace(dial, accumulate=passes)) for passes in (2, 3))
            return three + (dial.accumulate - 3) * (three - two)
        time = estimate_time(self.spec, plan=self.plan(dial), cluster=self.cluster, optimizer=self.optimizer)
        assert time is not None
        return time.step_seconds

    def timed(self) -> list[Dial]:
        """The dials whose speed was asked for."""
        return list(self._seconds)

    def uniform(self, choice: Choice, *, like: Dial) -> Dial:
        """All units with one choice, else as another dial."""
        return replace(like, root=choice.row, choices=(choice,) * len(self.names))
