"""The spec of a task, from a trace of its model."""

from collections.abc import Collection
from dataclasses import replace

from shardwise.engine.activations.tiled import check_tiles, tile_modules
from shardwise.models.specs.spec_request import SpecRequest
from shardwise.models.tasks import Task
from shardwise.plan.policy import AUTO_UNITS
from shardwise.spec import ModelSpec
from shardwise.trace import Way, trace_model


def trace_task(
    task: Task,
    *,
    name: str,
    ways: Collection[tuple[str, str]],
    kernels: str = "cuda",
    fp8: Collection[str] = (),
    policy: str = AUTO_UNITS,
) -> ModelSpec:
    """Return the spec of a task with a trace for each of `ways`: (computes in, recompute or its COMPILED value).

    `kernels`: the device whose kernels are traced, cuda or cpu. `fp8`: weights that are multiplied in fp8 in ways that
    compute so. `policy` cuts the model into units.
    """
    traced = trace_model(
        task.model,
        loss=task.loss,
        make_batch=task.make_batch,
        name=name,
        ways=[Way(computes_in=computes_in, recompute=recompute, device=kernels) for computes_in, recompute in ways],
        fp8=fp8,
        policy=policy,
    )
    return replace(traced, seq=task.tokens_per_sample)


def trace_request(task: Task, request: SpecRequest, *, ways: Collection[tuple[str, str]]) -> ModelSpec:
    """Return the spec of a task as a plan runs it, in the units and the tiles of the request."""
    tile, undo = dict(request.tile), []
    if tile:
        check_tiles(task.model, tile=tile, units=())
        undo = tile_modules(task.model, tile=tile, verifies=False)
    try:
        return trace_task(
            task,
            name=request.reference,
            ways=ways,
            kernels=request.kernels,
            fp8=request.fp8,
            policy=request.units,
        )
    finally:
        for one in reversed(undo):
            one()
