"""Advice on an out-of-memory error of a training: the planner's prediction, and a change of the plan that fits.

The engine has already noted on the error what the memory was held for (engine/out_of_memory.py). The rank that
failed runs `python -m shardwise.training.fitting.memory_advice`: tracing takes time, and a task of the user's may do
anything when it is loaded again. That process uses no device, and imports torch only to trace.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from shardwise.base.errors import ShardwiseError, UnknownName
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.base.vocabulary.segments import segments_expand
from shardwise.hardware.cluster import Cluster, make_cluster
from shardwise.hardware.measuring.device_file import device_like
from shardwise.hardware.sourced import Sourced
from shardwise.planner.search.nearest import changed_settings, nearest_fit
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_sections import OptimizerSection

if TYPE_CHECKING:
    from shardwise.comm.job.join import Place

# The other ranks wait for the advice; the watchdog's limit (run.watch_seconds) is longer.
_LIMIT_SECONDS = 60.0
_VERDICTS = {
    "no": ": does not fit",
    "tight": ": may not fit",
    "yes": ": should fit, so less was free than the device has",
    "unknown": "",
}


def advice(config: TrainConfig, *, place: "Place") -> str:
    """Return the planner's lines for a rank that ran out of memory."""
    return "\n".join(f"  {line}" for line in _advice(config, place=place))


def _advice(config: TrainConfig, *, place: "Place") -> list[str]:
    import torch

    is_cuda = place.device.type == "cuda"
    full = FullDevice(
        kind=place.device.type,
        title=torch.cuda.get_device_name(place.device) if is_cuda else "cpu",
        capacity_bytes=torch.cuda.get_device_properties(place.device).total_memory if is_cuda else None,
        num_ranks=place.num_ranks,
    )
    try:
        done = subprocess.run(
            # -P: like our own command, without the working folder among the modules.
            [sys.executable, "-P", "-m", "shardwise.training.fitting.memory_advice"],
            input=json.dumps({"config": config.to_dict(), "full": asdict(full)}),
            # The device is full: the task must load without it.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.splitlines()
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {_LIMIT_SECONDS:g} s"
    plan = config.plan
    return [
        f"what fits was not predicted ({why}); to try it: shardwise plan {config.task.model} --cluster "
        f"{place.num_ranks}xDEVICE --precision {plan.precision} --micro-batch {plan.micro_batch}"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDevice:
    """The device that ran out of memory: `kind` is cuda or cpu, `title` the driver's name; its size, if it is known."""

    kind: str
    title: str
    capacity_bytes: int | None
    num_ranks: int

    def cluster(self) -> Cluster:
        """Return all ranks as one node: links do not matter to memory."""
        capacity = None
        if self.capacity_bytes is not None:
            capacity = Sourced(value=self.capacity_bytes, kind="measured", source="torch, on this device")
        device = replace(device_like(self.title, kind=self.kind), capacity_bytes=capacity)
        cluster = make_cluster(device, num_nodes=1, devices_per_node=self.num_ranks, fabric=None)
        return replace(cluster, expands_segments=segments_expand(os.environ))


def describe_fit(config: TrainConfig, *, full: FullDevice) -> Iterator[str]:
    """Yield two lines: the prediction for the plan that failed, and the smallest change of it that fits."""
    model = config.task.named(kernels=full.kind)
    rule = optimizer_rule(config.optimizer, device=full.kind)
    this, fits = nearest_fit(model.spec_for, plan=config.plan, cluster=full.cluster(), optimizer=rule)
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in this.memory.breakdown_bytes.items())
    room = "" if full.capacity_bytes is None else f" of {bytes_text(full.capacity_bytes)}"
    need = bytes_text(this.memory.device_bytes)
    yield f"predicted for this plan: {need}{room} per rank{_VERDICTS[this.fits]} ({parts})"
    if fits is None:
        yield f"fits: no change of [plan] on {full.num_ranks} devices; take more of them, or a smaller model or input"
        return
    # As lines of a config, or as values of --set.
    changed = changed_settings(fits.plan, of=config.plan)
    keys = ", ".join(f"plan.{name} = {json.dumps(value)}" for name, value in changed.items())
    what = "needs less" if fits.fits == "unknown" else "fits"
    yield f"{what}: {keys} ({bytes_text(fits.memory.device_bytes)})"


def optimizer_rule(section: OptimizerSection, *, device: str) -> str:
    """Return the planner's rule for the kernels that torch uses: fused if asked for, else a loop (CPU) or foreach."""
    if section.name == "sgd":
        return "sgd" if section.momentum else "sgd-plain"
    if section.name not in ("adamw", "adam", "muon"):
        raise UnknownName.of("optimizer of the planner", section.name, known=("adamw", "adam", "sgd", "muon"))
    kernels = "fused" if section.fused else "loop" if device == "cpu" else "foreach"
    return f"muon-{kernels}" if section.name == "muon" else f"adamw-{kernels}"


def main() -> None:
    """Read JSON from standard input, print lines; exit with code 2 and one line if there is no prediction."""
    asked = json.load(sys.stdin)
    try:
        for line in describe_fit(TrainConfig.from_dict(asked["config"]), full=FullDevice(**asked["full"])):
            print(line)
    except ShardwiseError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
