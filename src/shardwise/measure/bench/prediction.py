"""Asks the planner about the cases of a bench: same model, batch, optimizer and device. Only tracing a model needs
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.base.errors import InvalidCluster
from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.cluster import make_cluster, read_cluster_file
from shardwise.hardware.measuring.device_file import device_like
from shardwise.measure.bench.case_result import PredictedCase
from shardwise.measure.profile.compare import predict_memory
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import candidates
from shardwise.planner.search.request import AutoRequest
from shardwise.planner.search.scale import Scaled, scaling
from shardwise.planner.time.step_time import estimate_time, timeline
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_sections import OptimizerSection
from shardwise.training.fitting.memory_advice import optimizer_rule

PLANNED_ENGINES = ("shardwise", "captured", "torch")
"""Engines whose schedule the planner knows: not compiled units, nor torch's engine in a CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The planner's view of one bench; `device` is "cuda" or "cpu".

    It raises a ShardwiseError for a model that cannot be traced or an optimizer that the planner does not know.
    """

    model: Model
    cluster: Cluster
    device: str
    section: OptimizerSection
    clips: bool = False

    @property
    def optimizer(self) -> str:
        return optimizer_rule(self.section, device=self.device)

    def of(self, plan: Plan) -> PredictedCase:
        """Predict a case, with units as CUDA graphs if its plan has them: all steps of a bench are alike.

        Its time is None if the device's speed or links are unknown (step_time.why_not_timed).
        """
        assert plan.micro_batch is not None
        spec, cluster, optimizer = self.model.spec_for(plan), self.cluster, self.optimizer
        found = predict_memory(
            spec,
            plan=plan,
            num_ranks=cluster.num_ranks,
            batch=plan.micro_batch,
            optimizer=optimizer,
            device=self.device,
            as_graphs=plan.captures,
        )
        clips, graphs = self.clips, plan.captures
        time = estimate_time(spec, plan=plan, cluster=cluster, optimizer=optimizer, clips=clips, as_graphs=graphs)
        spans = (
            timeline(spec, plan=plan, cluster=cluster, optimizer=optimizer, clips=clips, as_graphs=graphs)
            if time is not None
            else []
        )
        return PredictedCase(
            allocated_bytes=found.memory.allocated_bytes,
            breakdown_bytes=dict(found.memory.breakdown_bytes),
            entries=tuple((entry.at, dict(entry.num_bytes)) for entry in found.entries),
            step_seconds=None if time is None else time.step_seconds,
            exposed_seconds=None if time is None else time.exposed_comm_seconds,
            spans=tuple(spans),
        )

    def solved(self, plan: Plan) -> Plan:
        """Return the auto plan for the same batch, so that it does the same training as the other cases."""
        request = AutoRequest(plan=plan, cluster=self.cluster, optimizer=self.optimizer)
        return solve_plan(self.model.spec_for, request=request).candidate.plan

    def scaled(self, plan: Plan, *, strategies: Sequence[str]) -> list[Scaled]:
        """Predict the same training on more devices; empty if step times or links between nodes are unknown."""
        plan = replace(plan, engine="shardwise", capture="off", mesh=None, across=ACROSS[0])
        if self.cluster.fabric is None and self.cluster.device.nic is None:
            return []
        found = candidates(
            self.model.spec_for,
            plan=plan,
            strategies=strategies,
            cluster=self.cluster,
            optimizer=self.optimizer,
            goal="throughput",
        )
        if found[0].time is None:
            return []
        return scaling(self.model.spec_for, plan=plan, found=found, cluster=self.cluster, optimizer=self.optimizer)


def forecast_of(config: TrainConfig, *, cluster: Cluster, device: str) -> Forecast:
    """Load the model, or raise an error about its name. It is traced for the first prediction."""
    model = config.task.named(kernels=device)
    model.spec_for()
    clips = config.train.clip_norm > 0
    return Forecast(model=model, cluster=cluster, device=device, section=config.optimizer, clips=clips)


def cluster_here(*, num_ranks: int, device: str, title: str, cluster: str | None, devices: str | None) -> Cluster:
    """Return the planner's description of the devices that the bench runs on.

    The user may name them: `cluster` as in `shardwise plan`, `devices` a file of `shardwise calibrate`. Otherwise it is
    the device in the tables whose name occurs in the driver's `title`.
    """
    if cluster is None and devices is None:
        return make_cluster(device_like(title, kind=device), num_nodes=1, devices_per_node=num_ranks, fabric=None)
    measured = read_cluster_file(devices) if devices is not None else None
    if cluster is None:
        assert measured is not None
        found = replace(measured, num_nodes=1, devices_per_node=num_ranks, fabric=None)
    else:
        found = cluster_of(cluster)
    if measured is not None:
        found = replace(found, device=measured.device, link=measured.link or found.link)
    if found.num_ranks != num_ranks:
        raise InvalidCluster(f"--cluster {cluster} has {found.num_ranks} devices, and the bench {num_ranks} ranks")
    if (found.device.name == "cpu") != (device == "cpu"):
        raise InvalidCluster(f"the bench runs on {device}, and {cluster or devices} is of {found.device.name}")
    return found
