"""Traces models of the catalogue into the specs that come with the package.

python -m shardwise.models.specs.ship [NAME …]     (default: the models that have one)
"""

import sys
from dataclasses import replace
from pathlib import Path

from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import TokenShape
from shardwise.models.specs.spec_store import FOLDER
from shardwise.models.tasks import load_task
from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import COMPILED
from shardwise.program.spec.store import save_spec

WAYS = (
    *(Way(computes_in=dtype, recompute=how) for dtype in ("fp32", "bf16") for how in ("none", "full", "selective")),
    # torch's DDP, which does not recompute.
    Way(computes_in="autocast"),
    *(Way(recompute=how) for how in COMPILED.values()),
)


def make_ready_spec(name: str, *, ways: tuple[Way, ...] = WAYS) -> ModelSpec:
    """Return the spec of a catalogue model; for models that read tokens, with laws for every length."""
    shape = shape_of(name)
    task = load_task(name, device="meta")
    if not isinstance(shape, TokenShape):
        return trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name=name, ways=ways)
    lengths = (shape.max_seq, shape.max_seq // 2, shape.max_seq // 4)
    makers = {length: load_task(name, seq=length, device="meta").make_batch for length in lengths}
    spec = trace_model(task.model, loss=task.loss, make_batch=makers, name=name, ways=ways)
    return replace(spec, seq=shape.max_seq)


def main(names: list[str]) -> None:
    for name in names or [path.stem for path in sorted(FOLDER.glob("*.json"))]:
        path = Path(FOLDER, f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        save_spec(make_ready_spec(name), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
