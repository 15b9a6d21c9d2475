"""Our engine's own costs on the host, fitted to what `step_times.py --case probe` measured: no GPU, about a minute.

    python benchmarks/fit_overhead.py [--write]

Fitted, from the eager `ddp` and `fsdp` rows of catalogue models: two numbers, by which the costs of what every
strategy does (take, reduce, deliver, step, buffer) and of what sharded parameters add (gather, wait, free) are
multiplied. Which part of each sum an operation has is kept as it was. The reference host is that of the H200's
calibration; its two Python costs, which were not measured then, follow from the rows' hosts.
Validated, and never fitted: the Hugging Face models, time and memory.
`--write` writes src/shardwise/planner/our_overhead.toml and src/shardwise/hardware/calibrated/host.toml.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hugging_face_models import MODELS, task_of
from measuring import RESULTS as FOLDER
from memory_predictions import AS_MEASURED
from step_times import FITTED

from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.borrowed import host_factor
from shardwise.hardware.calibration import HostSpeed, dispatch_factor, read_host_speed, reference_host
from shardwise.hardware.measuring.device_file import write_table
from shardwise.models.reference import Model
from shardwise.models.specs.traced import trace_task
from shardwise.plan import Plan
from shardwise.planner import estimate
from shardwise.planner.engine_model import OVERHEADS, Overhead
from shardwise.planner.job import Job
from shardwise.planner.search.candidates import Candidate, cost
from shardwise.planner.time import step_time
from shardwise.program.spec import ModelSpec

ROOT = Path(__file__).parent.parent
RESULTS = FOLDER / "host_probe_h200.json"
CALIBRATED = FOLDER / "calibrate_h200.json"
OVERHEAD_FILE = ROOT / "src/shardwise/planner/our_overhead.toml"
HOST_FILE = ROOT / "src/shardwise/hardware/calibrated/host.toml"
EVERY_STRATEGY = ("take", "reduce", "deliver", "step", "buffer")
SHARDED_PARAMS = ("gather", "wait", "free")
SCALES = [0.1 * number for number in range(1, 21)]


def reference_of(rows: list[dict[str, Any]]) -> HostSpeed:
    """The host of the H200's calibration: its dispatch as measured then, its Python as it goes with dispatch."""
    dispatch = {
        row["role"]: {"forward": row["forward"], "backward": row["backward"]}
        for row in json.loads(CALIBRATED.read_text())["rows"]
        if row["name"] == "dispatch"
    }
    source = f"benchmarks/results/{CALIBRATED.name}; calls and hooks from {RESULTS.name}"
    rough = HostSpeed(source=source, call_seconds=1.0, hook_seconds=1.0, dispatch_seconds=dispatch)
    hosts = [read_host_speed(row["host"], where=RESULTS.name) for row in rows]
    relative = [(host, dispatch_factor(host, reference=rough)) for host in hosts]
    return replace(
        rough,
        call_seconds=statistics.median(host.call_seconds / factor for host, factor in relative),
        hook_seconds=statistics.median(host.hook_seconds / factor for host, factor in relative),
    )


@cache
def spec_of(name: str) -> ModelSpec:
    if name in FITTED:
        case = FITTED[name]
        return Model(name, seq=case.seq).spec_for(Plan(micro_batch=case.batch, precision="bf16"))
    return trace_task(task_of(name, device="meta", masked=True), name=name, ways=[("bf16", "none")])


def predicted(row: dict[str, Any], *, reference: HostSpeed, overhead: Overhead) -> Candidate:
    """The row's case on the row's host, with these costs of the engine."""
    name = row["model"]
    size = FITTED[name].batch if name in FITTED else MODELS[name].samples
    cluster = cluster_of("1xh200")
    host = read_host_speed(row["host"], where=RESULTS.name)
    cluster = replace(cluster, device=replace(cluster.device, host=host))
    has_graphs = row["capture"] != "off"
    plan = Plan(precision="bf16", micro_batch=size, strategy=row["strategy"], capture=row["capture"], **AS_MEASURED)
    # What was prepared with other costs is forgotten.
    step_time._known.cache_clear()
    with (
        patch("shardwise.hardware.borrowed.reference_host", lambda: reference),
        patch("shardwise.planner.time.pieces.overhead_of", _costs(overhead)),
    ):
        found = cost(spec_of(name), plan=plan, cluster=cluster, optimizer="adamw-fused", as_graphs=has_graphs)
    # They were made on the device.
    memory = estimate(
        spec_of(name),
        plan=plan,
        num_ranks=1,
        batch=size,
        optimizer="adamw-fused",
        made_on_device=True,
        as_graphs=has_graphs,
    )
    return replace(found, memory=memory)


def _costs(overhead: Overhead) -> Callable[..., Overhead]:
    def overhead_of(job: Job, *, cluster: Cluster) -> Overhead:
        return overhead.on(host_factor(cluster.device))

    return overhead_of


def seconds_of(row: dict[str, Any], *, reference: HostSpeed, overhead: Overhead) -> float:
    time = predicted(row, reference=reference, overhead=overhead).time
    assert time is not None
    return time.step_seconds


def scaled(base: Overhead, *, every: float, sharded: float) -> Overhead:
    factors = dict.fromkeys(EVERY_STRATEGY, every) | dict.fromkeys(SHARDED_PARAMS, sharded)
    return replace(base, **{name: factor * getattr(base, name) for name, factor in factors.items()})


def fit(rows: list[dict[str, Any]], *, reference: HostSpeed, base: Overhead) -> Overhead:
    """Least squares of the logarithms of predicted / measured, one factor after the other until neither moves."""

    def loss(factors: tuple[float, float]) -> float:
        overhead = scaled(base, every=factors[0], sharded=factors[1])
        return sum(
            log(seconds_of(row, reference=reference, overhead=overhead) / row["step_seconds"]) ** 2 for row in rows
        )

    found, before = (1.0, 1.0), None
    while found != before:
        before = found
        found = min(((scale, found[1]) for scale in SCALES), key=loss)
        found = min(((found[0], scale) for scale in SCALES), key=loss)
    print(f"× {found[0]:.2f} what every strategy does, × {found[1]:.2f} what sharded parameters add")
    return scaled(base, every=found[0], sharded=found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    row: dict[str, Any]
    candidate: Candidate

    @property
    def error(self) -> float:
        assert self.candidate.time is not None
        return self.candidate.time.step_seconds / self.row["step_seconds"] - 1

    def memory_error(self, kind: str) -> float:
        return float(getattr(self.candidate.memory, f"{kind}_bytes") / self.row[f"{kind}_bytes"] - 1)


def report(checked: list[Checked]) -> Iterator[str]:
    yield "| rows | model | strategy | step | measured ms | predicted ms | error | allocated | reserved |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in checked:
        row, time = one.row, one.candidate.time
        assert time is not None
        kind = "fitted" if row["model"] in FITTED else "validated"
        yield (
            f"| {kind} | {row['model']} | {row['strategy']} | {'eager' if row['capture'] == 'off' else 'graphs'} | "
            f"{1e3 * row['step_seconds']:.1f} | {1e3 * time.step_seconds:.1f} | {one.error:+.1%} | "
            f"{one.memory_error('allocated'):+.2%} | {one.memory_error('reserved'):+.2%} |"
        )
    yield ""
    groups = {
        "fitted, eager": [one for one in checked if one.row["model"] in FITTED],
        "validated, eager": [one for one in checked if one.row["model"] in MODELS and one.row["capture"] == "off"],
        "validated, graphs": [one for one in checked if one.row["model"] in MODELS and one.row["capture"] != "off"],
    }
    for name, group in groups.items():
        if group:
            errors = [abs(one.error) for one in group]
            yield (
                f"- {name}: {len(group)} rows, time: median {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
                + "; ".join(
                    f"{kind}: worst {max(abs(one.memory_error(kind)) for one in group):.2%}"
                    for kind in ("allocated", "reserved")
                )
            )


def check_shipped() -> list[Checked]:
    """All measured rows, predicted with the constants that the package has."""
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if not row.get("error")]
    ours = OVERHEADS["shardwise"]
    return [Checked(row=row, candidate=predicted(row, reference=reference_host(), overhead=ours)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="write what was fitted into the package")
    options = parser.parse_args()
    measured = json.loads(options.rows.read_text())
    rows = [row for row in measured["rows"] if not row.get("error")]
    reference, base = reference_of(rows), OVERHEADS["shardwise"]
    found = fit([row for row in rows if row["model"] in FITTED], reference=reference, base=base)
    for name in (*EVERY_STRATEGY, *SHARDED_PARAMS):
        print(f"{name:8} {1e6 * getattr(base, name):7.0f} → {1e6 * getattr(found, name):7.0f} µs")
    checked = [Checked(row=row, candidate=predicted(row, reference=reference, overhead=found)) for row in rows]
    print("\n".join(report(checked)))
    if options.write:
        by = "python benchmarks/fit_overhead.py --write"
        seconds = {name: value for name, value in asdict(found).items() if isinstance(value, float)}
        write_table({"source": f"benchmarks/results/{options.rows.name}", "seconds": seconds}, OVERHEAD_FILE, by=by)
        write_table({"host": reference.to_data()}, HOST_FILE, by=by)


if __name__ == "__main__":
    main()
