"""The cost of a dial by the planner's replay: bytes on the device, samples per second. No torch.

Replaying a dial takes some milliseconds at any batch; another batch of the same dial is nearly free. Both are cached,
so that a search may ask repeatedly.
"""

from dataclasses import dataclass, field, replace
from math import inf

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.job import Job
from shardwise.planner.memory.states import may_cross
from shardwise.planner.search.candidates import cluster_memory, fits_host
from shardwise.planner.search.dial import Choice, Dial, equal_units, plan_of, turned_units
from shardwise.planner.time.step_time import job_on, time_job
from shardwise.program.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class DialCosts:
    """The costs of the dials of one model on one cluster. `base`: the plan with all settings that a dial lacks.

    names    the units of a dial's choices, in order
    classes  positions of consecutive equal units
    """

    spec: ModelSpec
    base: Plan
    cluster: Cluster
    optimizer: str
    names: tuple[str, ...] = ()
    classes: tuple[range, ...] = ()
    _plans: dict[Dial, Plan] = field(default_factory=dict)
    _bytes: dict[Dial, int] = field(default_factory=dict)
    _host: dict[Dial, int] = field(default_factory=dict)
    _seconds: dict[Dial, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = turned_units(self.spec)
        self.classes = tuple(equal_units(self.spec))

    @property
    def band(self) -> float:
        return engine_model_of(self.base).error_band

    @property
    def num_replays(self) -> int:
        return len(self._plans)

    def plan(self, dial: Dial) -> Plan:
        key = replace(dial, batch=1)
        if key not in self._plans:
            self._plans[key] = plan_of(key, names=self.names, base=self.base, may_cross=may_cross(self.optimizer))
        return replace(self._plans[key], micro_batch=dial.batch)

    def _job(self, dial: Dial) -> Job:
        return job_on(self.spec, plan=self.plan(dial), cluster=self.cluster, optimizer=self.optimizer)

    def tensor_bytes(self, dial: Dial) -> int:
        """Return the bytes on the device without the allocator's model. Later passes hold what the second holds."""
        if dial not in self._bytes:
            passes = min(dial.accumulate, 2)
            self._bytes[dial] = self._device_bytes(replace(dial, accumulate=passes), limit_bytes=None, quick=True)
        return self._bytes[dial]

    def device_bytes(self, dial: Dial, *, limit_bytes: float) -> int:
        """Return the bytes on the device, including what the allocator reserves if it may use `limit_bytes`."""
        limit = None if limit_bytes == inf else round(limit_bytes)
        return self._device_bytes(dial, limit_bytes=limit, quick=False)

    def _device_bytes(self, dial: Dial, *, limit_bytes: int | None, quick: bool) -> int:
        job, cluster = self._job(dial), self.cluster
        found = cluster_memory(job, batch=dial.batch, cluster=cluster, limit_bytes=limit_bytes, quick=quick)
        self._host[dial] = found.host_bytes
        return found.device_bytes

    def based_on(self, plan: Plan) -> "DialCosts":
        """Return the costs of the same model on the same cluster with another base plan."""
        return DialCosts(spec=self.spec, base=plan, cluster=self.cluster, optimizer=self.optimizer)

    def fits_host(self, dial: Dial) -> bool:
        """Return whether what is in host memory fits there."""
        self.tensor_bytes(dial)
        return fits_host(self._host[replace(dial, accumulate=min(dial.accumulate, 2))], cluster=self.cluster)

    def speed(self, dial: Dial) -> float:
        """Return the samples per second of all ranks together."""
        return dial.batch * dial.accumulate * self.cluster.num_ranks / self.step_seconds(dial)

    def step_seconds(self, dial: Dial) -> float:
        if dial not in self._seconds:
            self._seconds[dial] = self._timed(dial)
        return self._seconds[dial]

    def _timed(self, dial: Dial) -> float:
        if dial.accumulate > 3:
            # Each further pass takes as long as the middle one of three.
            two, three = (self.step_seconds(replace(dial, accumulate=passes)) for passes in (2, 3))
            return three + (dial.accumulate - 3) * (three - two)
        time = time_job(self._job(dial), batch=dial.batch, cluster=self.cluster)
        assert time is not None
        return time.step_seconds

    def timed(self) -> list[Dial]:
        """Return the dials whose time was predicted."""
        return list(self._seconds)

    def uniform(self, choice: Choice, *, like: Dial) -> Dial:
        """Return a dial with one choice for all units, otherwise like another dial."""
        return replace(like, root=choice.row, choices=(choice,) * len(self.names))
