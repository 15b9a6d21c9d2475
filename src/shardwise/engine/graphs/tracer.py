"""Traces units with TorchDynamo: one compiled function for each class of block, order of keywords and model.

The compiled function calls graphs (traced_graph.py) and does in Python what cannot be in one. Guards find out whether a
trace fits a call. What the tracer declines runs in Python, inside of the compiled function.

Each function has code of its own, so that neither our traces count for the user's own torch.compile nor the other way
round. torch's settings are changed only while it traces.
"""

import random
import time
import types
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from shardwise.base.torch_internals import torch_private
from shardwise.engine.graphs.trace_gaps import NotTraced, noticing_gaps
from shardwise.engine.graphs.traced_graph import Outputs, TracedGraph

_SETTINGS = {
    # Lengths, evaluation, autocast and frozen weights each take a trace; the time spent is what is bounded.
    "recompile_limit": 256,
    "accumulated_recompile_limit": 1024,
    "skip_nnmodule_hook_guards": False,
    # Such as a product and a sum in the place of `add_(…, alpha=…)`, which differ by rounding.
    "enable_dynamo_decompositions": False,
    # torch's functions in the place of numpy's, which differ by rounding too.
    "trace_numpy": False,
    # A counter on a module is an input of the graph rather than a trace of its own for each number.
    "allow_unspec_int_on_nn_module": True,
    # torch 2.11 does not check a dict of a module again under Python 3.12; later versions leave this out themselves.
    "use_recursive_dict_tags_for_guards": False,
}
# Seconds of tracing, and the share of all later time.
_SECONDS = 10.0
_SHARE = 0.05
# Their draws would be those of the trace.
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def _call(forward: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
    return forward(*inputs, **options)


class Tracer:
    """Compiles the forwards of one model's units.

    seconds   of CPU spent on tracing so far
    why_not   why the last call was not traced, in one line
    """

    def __init__(self, *, compiler: str = "none") -> None:
        self.seconds = 0.0
        self.why_not = ""
        self.compiler = compiler
        self._began = time.monotonic()
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._numbers = count()

    def function(self, forward: Callable[..., Any], *, names: tuple[str, ...]) -> Callable[..., Any]:
        """Return a function that calls `forward`, given first, with keywords in this order, compiled."""
        module = getattr(forward, "__self__", None)
        key = (type(module), getattr(forward, "__func__", forward), names)
        if key not in self._functions:
            # torch remembers by this name which shapes and numbers vary.
            name = f"{type(module).__name__}_{id(self):x}_{next(self._numbers)}"
            own = types.FunctionType(_call.__code__.replace(co_name=name), {"__builtins__": __builtins__})
            self._functions[key] = self._compiled(own, forget=partial(self._functions.pop, key, None))
        return self._functions[key]

    def _compiled(self, function: Callable[..., Any], *, forget: Callable[[], Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"guard_filter_fn": self._check_guards}
        try:
            # Traces of the user's functions, where a frame goes on after a break, are apart as well.
            context = torch_private.optimize(self._backend, **options, isolate_recompiles=True)
        except TypeError:
            # torch 2.12 and older.
            context = torch_private.optimize(self._backend, **options)
        convert = getattr(context, "callback", None)
        if convert is None:
            self.why_not = "torch.compile is disabled"
            return function
        context.callback = _Convert(convert, tracer=self)
        compiled: Callable[..., Any] = context(function)
        return partial(self._run, compiled, forget)

    def _run(self, compiled: Callable[..., Any], forget: Callable[[], Any], /, *inputs: Any, **options: Any) -> Any:
        # A compiler that the plan asks for takes as long as it takes.
        if self.compiler != "none" or self.seconds <= _SECONDS + _SHARE * (time.monotonic() - self._began):
            seconds = self.seconds
            try:
                return compiled(*inputs, **options)
            except Exception:
                if self.seconds > seconds:
                    # torch traces code no more in which it has found an error of the user's.
                    forget()
                raise
        self.why_not = f"{self.seconds:.0f} seconds were spent on tracing"
        with torch.compiler.set_stance("eager_on_recompile"):
            return compiled(*inputs, **options)

    def _backend(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> TracedGraph:
        compiled: Callable[..., Outputs] | None = None
        if self.compiler != "none":
            compiled = torch_private.lookup_backend(self.compiler)(module, examples)
        return TracedGraph(module, compiled=compiled, writes_python=_writes_python())

    def _check_guards(self, entries: Sequence[Any]) -> list[bool]:
        # There torch 2.11 leaves the module whose attribute a guard finds missing; its guards would keep the model.
        scope = torch_private.guards_scope()
        for name in [name for name in scope if name.startswith("tmp")]:
            del scope[name]
        for entry in entries:
            if entry.has_value and isinstance(entry.value, _GENERATORS):
                raise _Declined(f"{entry.name} is a generator of random numbers of its own")
        return [True] * len(entries)


def _writes_python() -> bool:
    """Return whether the code that is traced now writes into objects that were there before."""
    effects = torch_private.InstructionTranslator.current_tx().output.side_effects
    return any(
        effects.is_modified(one) and not isinstance(one.mutation_type, torch_private.AttributeMutationNew)
        for one in effects.id_to_variable.values()
    )


class _Declined(Exception):  # noqa: N818 - is caught below
    pass


class _Convert:
    """torch's function that traces a frame, with our settings.

    torch knows compiled code by the backend behind `_torchdynamo_orig_backend`.
    """

    def __init__(self, convert: Callable[..., Any], *, tracer: Tracer) -> None:
        self._torchdynamo_orig_backend = convert
        self._convert = convert
        self._tracer = tracer

    def __call__(self, *frame: Any, **options: Any) -> Any:
        tracer, began = self._tracer, time.thread_time()
        breaks = torch_private.dynamo_counters["graph_break"]
        before = len(breaks)
        try:
            with torch_private.dynamo_settings(**_SETTINGS), noticing_gaps(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\._dynamo")
                return self._convert(*frame, **options)
        except Exception as error:
            # The frame runs in Python, as one that the tracer itself declines.
            tracer.why_not = _in_one_line(error)
            return torch_private.ConvertFrameReturn()
        finally:
            tracer.seconds += time.thread_time() - began
            if len(breaks) > before:
                tracer.why_not = next(reversed(breaks)).strip().splitlines()[0]


def _in_one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, _Declined) else error
    # torch says in the second line what the first one is about.
    said = " ".join(str(cause).split("\n")[:2]).strip() or type(cause).__name__
    return said.removeprefix(f"{NotTraced.__name__}: ")
