"""The spec of a task, from a trace of its model."""

from collections.abc import Collection
from dataclasses import replace

from shardwise.engine.activations.tiled import check_tiles, tile_modules
from shardwise.models.tasks import Task
from shardwise.models.trace import Way, trace_model
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.program.spec import ModelSpec


def trace_task(
    task: Task,
    *,
    name: str,
    ways: Collection[tuple[str, str]],
    kernels: str = "cuda",
    fp8: Collection[str] = (),
    policy: str = AUTO_UNITS,
    tile: Collection[tuple[str, int]] = (),
) -> ModelSpec:
    """Return the spec of a task with a trace for each of `ways`: (computes in, recompute or its COMPILED value).

    `kernels`: the device whose kernels are traced, cuda or cpu. `fp8`: weights that are multiplied in fp8 in ways that
    compute so. `policy` cuts the model into units. `tile`: modules that compute in tiles of so many tokens.
    """
    check_tiles(task.model, tile=dict(tile), units=())
    undo = tile_modules(task.model, tile=dict(tile), verifies=False)
    try:
        traced = trace_model(
            task.model,
            loss=task.loss,
            make_batch=task.make_batch,
            name=name,
            ways=[Way(computes_in=computes_in, recompute=recompute, device=kernels) for computes_in, recompute in ways],
            fp8=fp8,
            policy=policy,
        )
    finally:
        for one in reversed(undo):
            one()
    return replace(traced, seq=task.tokens_per_sample)
