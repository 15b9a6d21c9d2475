"""A model, its loss and its batches → a spec with traces of its step. Laws are fitted to several sizes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.trace.cut import CannotCutError, find_runs, in_call_order
from shardwise.models.trace.fp8 import fp8_layers
from shardwise.models.trace.observe import ObservedStep, TracedTask, Way, observe
from shardwise.models.trace.rows import Size, to_rows
from shardwise.plan.patterns import UnitPolicy
from shardwise.program.spec import ANNOUNCED, ModelSpec, TensorSpec, UnitSpec
from shardwise.program.spec.step import Law, Run, StepRow, StepTrace, fit
from shardwise.program.units import model_spec, unit_modules
from shardwise.program.units.carried_tensors import carried_tensors

Loss = Callable[[nn.Module, Any], Tensor]
MakeBatch = Callable[[int], Any]

# Two determine a law, and its signs show whether it is plausible; a third would verify it and take half as long again.
BATCHES = (2, 3)


def trace_model(
    model: nn.Module,
    *,
    loss: Loss,
    make_batch: MakeBatch | dict[int, MakeBatch],
    name: str | None = None,
    policy: UnitPolicy | str = "auto",
    ways: Iterable[Way] = (Way(),),
    fp8: Collection[str] = (),
) -> ModelSpec:
    """Return the spec of a model with a trace of its step for each of `ways`.

    The model may be on the meta device; nothing is computed, and it is left as it was. With a `make_batch` for each of
    three lengths of sample, the laws hold for other lengths too. `fp8`: weights that are multiplied in fp8 in ways that
    compute so.
    """
    spec = model_spec(model, policy=policy, name=name)
    task = _task(spec, model=model, loss=loss, policy=policy)
    makers = make_batch if isinstance(make_batch, dict) else {0: make_batch}
    spec = _with_carried(spec, model=model)
    for way in ways:
        with fp8_layers(model, weights=fp8, computes_in=way.computes_in, device=way.device):
            spec = _with_way(spec, task=task, makers=makers, way=way)
    return spec


def _with_way(spec: ModelSpec, *, task: TracedTask, makers: dict[int, MakeBatch], way: Way) -> ModelSpec:
    try:
        return _with_trace(spec, task=task, makers=makers, way=way)
    except InvalidModel:
        if not way.is_compiled:
            raise
    # The compiler saves different tensors for different batches, so no law fits: use the uncompiled trace.
    spec = _with_trace(spec, task=task, makers=makers, way=way.eager)
    like = replace(spec.traces[-1], recompute=way.recompute)
    return replace(spec, traces=(*spec.traces[:-1], like))


def _with_trace(spec: ModelSpec, *, task: TracedTask, makers: dict[int, MakeBatch], way: Way) -> ModelSpec:
    """Return the spec with one more trace and the observed order of calls."""
    sizes = [(batch, length) for length in makers for batch in BATCHES]
    runs = find_runs(task.units)

    def observe_at(size: Size, runs: tuple[Run, ...]) -> ObservedStep:
        batch, length = size
        sized = replace(task, make_batch=makers[length])
        return observe(sized, way=way, batch_size=batch, runs=runs)

    first, runs = _first_step(partial(observe_at, sizes[0]), runs=runs, name=task.name)
    seen = {sizes[0]: first, **{size: observe_at(size, runs) for size in sizes[1:]}}
    rows = to_rows({size: observed.entries for size, observed in seen.items()}, name=task.name, runs=runs)
    batch_bytes = fit({size: observed.batch_bytes for size, observed in seen.items()})
    if way.is_compiled:
        rows = tuple(replace(row, stream=replace(row.stream, ops=())) for row in rows)
    trace = StepTrace(computes_in=way.computes_in, recompute=way.recompute, rows=rows, runs=runs)
    trace = in_call_order(trace, calls=first.calls)
    return replace(
        spec,
        units=tuple(replace(unit, backward=_backward(unit.name, first, runs=runs)) for unit in spec.units),
        call_order=first.calls,
        batch_bytes=batch_bytes or Law((0, 0, 0, 0, 0, 0)),
        traces=(*spec.traces, trace),
    )


def _backward(unit: str, observed: ObservedStep, *, runs: Sequence[Run]) -> str:
    """Return how the unit notices its backward; a unit that was not traced, as the traced ones of its run."""
    like = next((run.traced[1] for run in runs if unit in run.units and unit not in run.traced), unit)
    return observed.backward.get(like, ANNOUNCED)


def _first_step(
    observe_with: Callable[[tuple[Run, ...]], ObservedStep], *, runs: tuple[Run, ...], name: str
) -> tuple[ObservedStep, tuple[Run, ...]]:
    """Observe a step with as many runs cut as possible: those whose second and third unit do the same."""
    while True:
        try:
            observed = observe_with(runs)
        except CannotCutError as error:
            runs = tuple(run for run in runs if run != error.run)
            continue
        rows = to_rows({(1, 0): observed.entries, (2, 0): observed.entries}, name=name)
        periodic = tuple(run for run in runs if _is_periodic(rows, run=run))
        if periodic == runs:
            return observed, runs
        runs = periodic


def _is_periodic(rows: Sequence[StepRow], *, run: Run) -> bool:
    second, third = ([row for row in rows if row.unit == unit] for unit in run.traced[1:3])
    return len(second) == 4 and [(row.trigger, row.stream) for row in second] == [
        (row.trigger, row.stream) for row in third
    ]


def _with_carried(spec: ModelSpec, *, model: nn.Module) -> ModelSpec:
    """Add tensors that parameters carry, such as the scales of quantised weights, to the (unsharded) buffers."""
    parameters = dict(model.named_parameters())

    def carried(unit: UnitSpec) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=f"{param.name}.{path}",
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trainable=False,
                persistent=False,
            )
            for param in unit.params
            for path, tensor in carried_tensors(parameters[param.name])
        )

    return replace(spec, units=tuple(replace(unit, buffers=(*unit.buffers, *carried(unit))) for unit in spec.units))


def _task(spec: ModelSpec, *, model: nn.Module, loss: Loss, policy: UnitPolicy | str) -> TracedTask:
    if not any(param.trainable for unit in spec.units for param in unit.params):
        raise InvalidModel(f"{spec.name} has no trainable parameter: there is nothing to train")
    return TracedTask(
        name=spec.name,
        model=model,
        loss=loss,
        make_batch=lambda size: None,
        units=unit_modules(model, policy=policy),
        owners={param.name: unit.name for unit in spec.units for param in unit.params},
    )
