"""Of many equal blocks, only the first three and the last are traced. The others return their input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.spec.step import Run
from shardwise.trace.patch import replaced_forward

# A shorter run would save nothing.
_LEAST = 5
# Attributes that number a block and do not affect what it computes.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx")


def find_runs(units: Mapping[str, nn.Module]) -> tuple[Run, ...]:
    """Return runs of equal units in the order of registration, without units that contain units."""
    names = list(units)
    plain = [name for name in names if not any(other.startswith(name + ".") for other in names)]
    kinds = {name: kind_of(units[name]) for name in plain}
    runs = []
    for _, group in groupby(plain, key=lambda name: (name.rpartition(".")[0], kinds[name])):
        members = tuple(group)
        if len(members) >= _LEAST:
            runs.append(Run(units=members))
    return tuple(runs)


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
