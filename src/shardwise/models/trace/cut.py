"""Of many equal blocks, only the first three and the last are traced. The others return their input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.models.trace.patch import replaced_forward
from shardwise.program.spec import ROOT
from shardwise.program.spec.step import BEFORE_BACKWARD, BEFORE_FORWARD, FORWARD, Run, StepRow, StepTrace

# A shorter run would save nothing.
_LEAST = 5
# Attributes that number a block and do not affect what it computes.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx")


def find_runs(units: Mapping[str, nn.Module]) -> tuple[Run, ...]:
    """Return runs of equal units in the order of registration, without units that contain units.

    Units of other kinds may lie between those of a run, as where kinds of attention alternate (`in_call_order`).
    """
    names = list(units)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        if not any(other.startswith(name + ".") for other in names):
            groups.setdefault((name.rpartition(".")[0], kind_of(units[name])), []).append(name)
    return tuple(Run(units=tuple(members)) for members in groups.values() if len(members) >= _LEAST)


def in_call_order(trace: StepTrace, *, calls: Sequence[str]) -> StepTrace:
    """Return the trace with the rows of all units if others lie between those of a run; else as it is.

    A row of the root belongs to the begin or the end of its phase.
    """
    place = {unit: number for number, unit in enumerate(calls)}
    if all(place[last] - place[first] == 1 for run in trace.runs for first, last in pairwise(run.units)):
        return trace

    def order(row: StepRow) -> tuple[bool, float]:
        is_forward = row.trigger in FORWARD
        if row.unit == ROOT:
            return not is_forward, -inf if row.trigger in (BEFORE_FORWARD, BEFORE_BACKWARD) else inf
        return not is_forward, place[row.unit] if is_forward else -place[row.unit]

    return replace(trace, rows=tuple(sorted(trace.expand(), key=order)), runs=())


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for modules of equal computation: classes, shapes, and plain attributes."""
    parts = []
    for path, part in module.named_modules():
        tensors = tuple(
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for table in (part._parameters, part._buffers)
            for name, tensor in table.items()
            if tensor is not None
        )
        plain = tuple(
            (name, repr(value))
            for name, value in sorted(vars(part).items())
            if name not in _NUMBERS and isinstance(value, bool | int | float | str | tuple | None)
        )
        parts.append((path, type(part), tensors, plain))
    return tuple(parts)


class CannotCutError(Exception):
    """The output of a run's units does not look like their input, so none of them can be skipped."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.units[0])
        self.run = run


class Skipper:
    """Makes the untraced units of a run return their input.

    This requires that a unit's output is a tensor like its first input, alone or in a tuple with None.
    """

    def __init__(self, units: Mapping[str, nn.Module], *, runs: Sequence[Run]) -> None:
        self._units = units
        self._first = {run.units[0]: run for run in runs}
        self._run_of = {name: run for run in runs for name in run.units if name not in run.traced}
        self._returns: dict[Run, Callable[[Tensor], Any]] = {}

    def skips(self, name: str) -> bool:
        return name in self._run_of

    @property
    def skipped(self) -> list[nn.Module]:
        return [self._units[name] for name in self._run_of]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, run in self._first.items():
                stack.enter_context(self._units[name].register_forward_hook(self._look(run), with_kwargs=True))
            for name, run in self._run_of.items():
                stack.enter_context(replaced_forward(self._units[name], partial(self._pass_through, run)))
            yield

    def _look(self, run: Run) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, options: Any, output: Any) -> None:
            first = next((leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)), None)
            plain, rest = output, None
            if isinstance(output, tuple) and output and all(part is None for part in output[1:]):
                plain, rest = output[0], output[1:]
            if first is None or not isinstance(plain, Tensor) or geometry(first) != geometry(plain):
                raise CannotCutError(run)
            self._returns[run] = (lambda tensor: tensor) if rest is None else (lambda tensor: (tensor, *rest))

        return look

    def _pass_through(self, run: Run, forward: Callable[..., Any]) -> Callable[..., Any]:
        def skip(*args: Any, **options: Any) -> Any:
            if run not in self._returns:
                raise CannotCutError(run)
            return self._returns[run](next(leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)))

        return skip


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride()
