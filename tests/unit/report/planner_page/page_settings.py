"""Random settings of the planner page, and what the planner says of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardwise.hardware import Cluster
from shardwise.hardware.cluster import make_cluster
from shardwise.hardware.device import device_of
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate, candidates, cost, meshes
from shardwise.planner.search.recommend import recommend
from shardwise.planner.search.request import with_budget
from shardwise.report.planner_page.device_tables import offered_devices
from shardwise.report.planner_page.page_plans import DEVICE_COUNTS, HOSTS, PAGE_PLAN, PER_NODE, WAYS, strategies_with
from shardwise.report.planner_page.planner_document import longest_sample
from shardwise.sources import Source
from shardwise.spec import ModelSpec
from shardwise.vocabulary.categories import CATEGORIES

MODELS = ("llama-3.1-70b", "resnet18")
"""More layers than the allocator's model runs; images and convolutions."""

ALL_MODELS = (*MODELS, "gpt2-350m", "vit-large", "mpt-7b", "llama-3.2-1b")
"""Among them: several layers in one bucket."""

BATCHES = (1, 2, 3, 5, 8, 17, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As the page has them; `batch` None: the most that fits."""

    model: str
    device: str
    count: int
    recompute: str
    seq: int | None
    batch: int | None
    budget: int | None = None
    host: str = "none"

    @property
    def cluster(self) -> Cluster:
        nodes = max(1, self.count // PER_NODE)
        cluster = make_cluster(
            device_of(self.device), num_nodes=nodes, devices_per_node=self.count // nodes, fabric=None
        )
        return with_budget(cluster, budget_bytes=self.budget)

    @property
    def plan(self) -> Plan:
        return replace(PAGE_PLAN, recompute=self.recompute, micro_batch=self.batch, **HOSTS[self.host])

    @property
    def strategies(self) -> list[str]:
        return strategies_with(self.host)

    @property
    def spec(self) -> ModelSpec:
        return spec_at(self.model, self.seq)

    def as_data(self) -> dict[str, Any]:
        names = ("device", "count", "recompute", "seq", "batch", "budget", "host")
        return {name: getattr(self, name) for name in names}


@cache
def _spec(model: str) -> ModelSpec:
    source = Source(model)
    for way in WAYS:
        spec = source.spec_for(replace(PAGE_PLAN, recompute=way))
    return spec


@cache
def spec_at(model: str, seq: int | None) -> ModelSpec:
    return replace(_spec(model), seq=seq)


def random_settings(
    rng: random.Random, *, models: Sequence[str], host: str = "none", free_batch: bool = False
) -> Settings:
    model = rng.choice(models)
    longest = longest_sample(model)
    device = rng.choice(offered_devices())
    most = DEVICE_COUNTS[-1] if device.nic is not None and host == "none" else PER_NODE
    return Settings(
        model=model,
        device=device.name,
        count=rng.choice([count for count in DEVICE_COUNTS if count <= most]),
        recompute=rng.choice(WAYS),
        # Any length, not only those of the slider's stops.
        seq=rng.choice([rng.randrange(1, longest + 1), 512]) if longest is not None else None,
        batch=None if free_batch else rng.choice(BATCHES),
        budget=random_budget(rng, device.name),
        host=host,
    )


def random_budget(rng: random.Random, device: str) -> int | None:
    capacity = device_of(device).capacity_bytes
    assert capacity is not None
    return rng.choice([None, rng.randrange(2**30, capacity.value)])


def one_cost(settings: Settings, strategy: str, mesh_number: int) -> Candidate:
    """A strategy at the settings, on the mesh of that number (of as many as there are)."""
    found = meshes(strategy, plan=settings.plan, cluster=settings.cluster)
    plan = replace(settings.plan, strategy=strategy, mesh=found[mesh_number % len(found)])
    return cost(settings.spec, plan=plan, cluster=settings.cluster, optimizer="adamw", quick=True)


def all_costs(settings: Settings, *, quick: bool = False) -> list[Candidate]:
    return candidates(
        lambda plan: settings.spec,
        plan=settings.plan,
        strategies=settings.strategies,
        cluster=settings.cluster,
        optimizer="adamw",
        goal="throughput",
        quick=quick,
    )


def recommended(settings: Settings, found: list[Candidate]) -> Candidate | None:
    return recommend(found, goal="throughput", spec_for=lambda plan: settings.spec, optimizer="adamw").best


def numbers(candidate: Candidate) -> list[Any]:
    """What the page must show of a candidate: exact bytes, and seconds."""
    memory, time, mesh = candidate.memory, candidate.time, candidate.plan.mesh
    assert time is not None
    assert mesh is not None
    of_rank = [memory.allocated_bytes, memory.device_bytes, memory.host_bytes]
    whole = [candidate.batch, *of_rank, mesh.replicate, mesh.shard]
    parts = [memory.breakdown_bytes[name] for name in CATEGORIES]
    rates = [time.step_seconds, time.samples_per_s, time.exposed_comm_seconds, time.comm_seconds, time.cpu_seconds]
    more = [time.tokens_per_s_per_gpu or 0.0, time.mfu or 0.0, candidate.time_band.lower]
    return [candidate.plan.strategy, candidate.fits, memory.peak_at, whole + parts, rates + more]


NUMBERS_IN_PAGE = """
(one) => [one.strategy, one.fits, one.at,
  [one.batch, one.allocated, one.device, one.host, one.mesh.replicate, one.mesh.shard, ...one.breakdown],
  [one.time.seconds, one.time.samplesPerSecond, one.time.exposed, one.time.sent, one.time.cpuSeconds,
   one.time.tokensPerSecondPerDevice ?? 0, one.time.mfu ?? 0, one.time.band]]
"""
"""The same of a candidate of the page."""
