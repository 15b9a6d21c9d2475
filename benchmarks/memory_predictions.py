"""What the planner predicts for measured memory, and how far off it is; `validate_memory.py --predict` prints it.

Rows are those of validate_memory.py, or of captured_models.py. Errors are predicted / measured − 1.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from hugging_face_models import MODELS, task_of

from shardwise.models.catalogue import CATALOGUE, shape_of
from shardwise.models.reference import Model
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import cross_entropy, token_task
from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate
from shardwise.planner.memory.constants import DEFAULT_COMMUNICATOR_BYTES
from shardwise.planner.ways import traced_ways
from shardwise.program.spec import ModelSpec

Row = dict[str, Any]

TOTALS = ("allocated", "reserved", "device")

AS_MEASURED: dict[str, Any] = {"piece_bytes": 0}
"""Settings that plans had, without a key for them, when rows were measured: each unit was reduced in one piece."""


# Language models as they were when results/step_times_h200.json and validate_memory_h200.json were measured: their
# vocabularies not padded, trained with the usual loss. Once these are measured again, `Model` of their names will do.


@cache
def source_as_measured(model: str, *, seq: int | None = None, image: int | None = None) -> Model:
    """Return the source of a row's model. Of MPT, and of what is not in the catalogue, nothing has changed."""
    if isinstance(CATALOGUE.get(model), GPTShape | LlamaShape) and not model.startswith("mpt-"):
        # Given as a task, since the specs that come with the package are of the padded models.
        shape = replace(shape_of(model), vocab_multiple=1)
        return Model(replace(token_task(shape, seq=seq, device="meta"), loss=cross_entropy), seq=seq)
    return Model(model, seq=seq, image=image)


@cache
def hugging_face_spec(name: str, backend: str) -> ModelSpec:
    task, plan = task_of(name, device="meta"), Plan(precision="bf16", compile=backend)
    bare = trace_task(task, name=name, ways=[])
    return trace_task(task, name=name, ways=[("bf16", way) for way in traced_ways(bare, plan=plan)])


def predict_row(row: Row, *, device: str = "cuda") -> MemoryEstimate:
    """Return the planner's answer to a measured case."""
    if row["model"] in MODELS:
        backend, has_graphs = row["compile"], row["capture"] != "off"
        spec = hugging_face_spec(row["model"], backend)
        plan = Plan(precision="bf16", capture=row["capture"], compile=backend, **AS_MEASURED)
        # captured_models.py makes its models on the GPU.
        batch = MODELS[row["model"]].samples
        return estimate(spec, plan=plan, num_ranks=1, batch=batch, made_on_device=True, as_graphs=has_graphs)
    plan = Plan(**{key: row[key] for key in ("strategy", "precision", "recompute", "engine")}, **AS_MEASURED)
    predicted = estimate(
        source_as_measured(row["model"], seq=row["seq"], image=row["image"]).spec_for(plan),
        plan=plan,
        num_ranks=row["num_ranks"],
        batch=row["batch"],
        optimizer=row["optimizer"],
        device=device,
        # In rehearsal there is no communicator.
        communicator_bytes=0 if row["absent"] else None,
    )
    # A real job's process has made one more, to measure what it takes.
    probe = 0 if row["absent"] else DEFAULT_COMMUNICATOR_BYTES
    return replace(predicted, device_bytes=predicted.device_bytes + probe)


def compare(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that were measured, each with `predicted` and `errors`."""
    found = []
    for row in rows:
        # Graphs of compiled units are not predicted.
        if row.get("error") or (row.get("compile", "none") != "none" and row["capture"] != "off"):
            continue
        predicted = predict_row(row)
        errors = {
            name: getattr(predicted, f"{name}_bytes") / row[f"{name}_bytes"] - 1
            for name in TOTALS
            if row.get(f"{name}_bytes")
        }
        if "rest_bytes" in row:
            errors["rest"] = predicted.at_rest_bytes / row["rest_bytes"] - 1
        found.append(row | {"predicted": predicted, "errors": errors})
    return found


_SHOWN = (
    "model",
    "engine",
    "strategy",
    "num_ranks",
    "precision",
    "recompute",
    "batch",
    "optimizer",
    "capture",
    "compile",
)


def report(rows: list[Row]) -> list[str]:
    """Return a line per case, worst first, then one per engine and total: the median error and the worst."""
    lines = []
    for row in sorted(rows, key=lambda row: -abs(row["errors"]["allocated"])):
        what = " ".join(str(row[key]) for key in _SHOWN if key in row)
        parts = "  ".join(f"{name} {100 * error:+6.2f}%" for name, error in row["errors"].items())
        size = f"{row['allocated_bytes'] / 2**20:9.1f} MiB"
        lines.append(f"{what:70} {size}  {parts}  {row['predicted'].peak_at}")
    for engine in dict.fromkeys(row.get("engine", "") for row in rows):
        for name in (*TOTALS, "rest"):
            own = [row["errors"] for row in rows if row.get("engine", "") == engine]
            errors = [abs(one[name]) for one in own if name in one]
            if errors:
                median, worst = statistics.median(errors), max(errors)
                lines.append(f"{engine:9} {name:9} of {len(errors)}: median {median:.2%}, worst {worst:.2%}")
    return lines
