"""`python -m shardwise.train.what_fits`: a training ran out of memory; what was predicted for it, and what would fit.

A process of its own, started by the rank that failed (memory_advice.py): tracing a model needs no memory of a device,
but time, and a task of the user's may do anything when it is loaded again. No torch here, but for a model that has to
be traced.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError, UnknownName
from shardwise.hardware.cluster import Cluster, make_cluster
from shardwise.hardware.device_file import device_like
from shardwise.hardware.sourced import Sourced
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.nearest import changed_settings, nearest_fit
from shardwise.sources import Source
from shardwise.train.config import OptimizerSection, TrainConfig
from shardwise.vocabulary.quantities import bytes_text

_VERDICTS = {
    "no": "does not fit",
    "tight": "may not fit",
    "yes": "should fit, so less was free than the device has",
    "unknown": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDevice:
    """Where memory ran out: `kind` is cuda or cpu, `title` the driver's name of it, and its size, if it is known."""

    kind: str
    title: str
    capacity_bytes: int | None
    num_ranks: int

    def cluster(self) -> Cluster:
        """All ranks as one node: links do not matter to memory."""
        device = device_like(self.title, kind=self.kind)
        capacity = None
        if self.capacity_bytes is not None:
            capacity = Sourced(value=self.capacity_bytes, kind="measured", source="torch, on this device")
        device = replace(device, capacity_bytes=capacity)
        return make_cluster(device, num_nodes=1, devices_per_node=self.num_ranks, fabric=None)


def what_fits(config: TrainConfig, *, full: FullDevice) -> Iterator[str]:
    """Two lines: the planner's prediction for the plan that failed, and the smallest change of it that fits."""
    source = Source(config.task.model, seq=config.task.seq, image=config.task.image, kernels=full.kind)
    rule = optimizer_rule(config.optimizer, device=full.kind)
    this, fits = nearest_fit(source.spec_for, plan=config.plan, cluster=full.cluster(), optimizer=rule)
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in this.memory.breakdown_bytes.items())
    room = "" if full.capacity_bytes is None else f" of {bytes_text(full.capacity_bytes)}"
    verdict = _VERDICTS[this.fits]
    yield f"predicted for this plan: {_need(this)}{room} per rank{': ' if verdict else ''}{verdict} ({parts})"
    if fits is None:
        yield f"fits: no change of [plan] on {full.num_ranks} devices; take more of them, or a smaller model or input"
    else:
        what = "needs less" if fits.fits == "unknown" else "fits"
        yield f"{what}: {_changes(fits.plan, of=config.plan)} ({_need(fits)})"


def _need(found: Candidate) -> str:
    return bytes_text(found.memory.device_bytes)


def _changes(plan: Plan, *, of: Plan) -> str:
    """As lines of a config, or as values of --set."""
    return ", ".join(f"plan.{name} = {json.dumps(value)}" for name, value in changed_settings(plan, of=of).items())


def optimizer_rule(section: OptimizerSection, *, device: str) -> str:
    """The planner's rule for the kernels that torch takes.

    Unless told to fuse: one tensor after the other on a CPU, and all at once (foreach) on a GPU.
    """
    if section.name == "sgd":
        return "sgd" if section.momentum else "sgd-plain"
    if section.name not in ("adamw", "adam", "muon"):
        raise UnknownName.of("optimizer of the planner", section.name, known=("adamw", "adam", "sgd", "muon"))
    kernels = "fused" if section.fused else "loop" if device == "cpu" else "foreach"
    return f"muon-{kernels}" if section.name == "muon" else f"adamw-{kernels}"


def main() -> None:
    """JSON on standard input, lines on standard output; what cannot be predicted is one line and exit code 2."""
    asked = json.load(sys.stdin)
    try:
        for line in what_fits(TrainConfig.from_dict(asked["config"]), full=FullDevice(**asked["full"])):
            print(line)
    except ShardwiseError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
