"""Units as torch.compile runs them: what is saved for backward, and what forward and backward allocate.

A unit's forward goes through torch's AOTAutograd on fake tensors, with Inductor's decompositions, its passes over the
joint graph, and its choice of what is saved (a minimal cut between forward and backward). No code is generated:
fused_graph.py follows the two graphs as Inductor would run them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.base.errors import TorchChanged
from shardwise.base.torch_internals import torch_private
from shardwise.models.trace.cut import geometry, kind_of
from shardwise.models.trace.patch import replaced_forward
from shardwise.models.trace.recorder import OpRecorder
from shardwise.program.spec import ROOT

Forward = Callable[..., Any]
Compiled = Callable[[list[Tensor], list[Tensor]], Any]
# Marks the position of a tensor among the inputs of a call.
_TENSOR = object()


@contextmanager
def compiled_units(
    units: Mapping[str, nn.Module], *, recorder: OpRecorder, kernels: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Inside, every unit but the root runs compiled; `kernels` is a context in which calls use the device's kernels.

    A unit with units inside it runs uncompiled: torch.compile would compile the pieces around them.
    """
    compiler = _Compiler(recorder, kernels=kernels)
    with ExitStack() as stack:
        for name, module in units.items():
            if name != ROOT and not any(other.startswith(name + ".") for other in units):
                stack.enter_context(replaced_forward(module, compiler.wrapper_of(module)))
        yield


class _Compiler:
    """Compiles equal units once."""

    def __init__(self, recorder: OpRecorder, *, kernels: Callable[[], AbstractContextManager[object]]) -> None:
        self._recorder = recorder
        self._kernels = kernels
        # Everything that determines the code of a call → its code; None if torch.compile cannot make one graph of it.
        self._known: dict[object, Compiled | None] = {}

    def wrapper_of(self, module: nn.Module) -> Callable[[Forward], Forward]:
        kind = kind_of(module)

        def wrap(forward: Forward) -> Forward:
            def run(*inputs: Any, **options: Any) -> Any:
                leaves, tree = tree_flatten((inputs, options))
                call = _Call(module, forward, leaves=leaves, tree=tree)
                key = (kind, str(tree), *map(_key, leaves), torch.is_grad_enabled())
                if key not in self._known:
                    self._known[key] = self._compiled(call)
                found = self._known[key]
                if found is None:
                    return forward(*inputs, **options)
                with torch_private.disable_current_modes():
                    return found(call.state, call.tensors)

            return run

        return wrap

    def _compiled(self, call: "_Call") -> Compiled | None:
        from shardwise.models.trace.fused_graph import FusedGraph

        graphs: list[FusedGraph] = []

        def follow(gm: fx.GraphModule, example_inputs: object) -> FusedGraph:
            graphs.append(FusedGraph(gm.graph, recorder=self._recorder))
            return graphs[-1]

        compiled: Compiled = torch_private.aot_function(
            call.without_tensors(self._kernels),
            follow,
            # Parameters and buffers exist in any case: saving them is free, as in torch.compile.
            partition_fn=partial(_partition, num_free=len(call.state)),
            decompositions=torch_private.select_decomp_table(),
            num_params_buffers=len(call.state),
        )
        before = len(self._recorder.entries)
        try:
            # With copies: torch keeps the tensors that it compiles for. What they save for backward does not count.
            with torch_private.disable_current_modes(), saved_tensors_hooks(_same, _same):
                compiled(_empty_copies(call.state), _empty_copies(call.tensors))
        except TorchChanged:
            raise
        except Exception:  # anything from the model or from torch; the uncompiled model raises it again
            if graphs:
                raise
            return None
        del self._recorder.entries[before:]
        return compiled


class _Call:
    """A call of a unit: its parameters and buffers, and its tensor and other inputs."""

    def __init__(self, module: nn.Module, forward: Forward, *, leaves: list[Any], tree: Any) -> None:
        named = dict((*module.named_parameters(), *module.named_buffers()))
        self.module, self.forward = module, forward
        self.names, self.state = list(named), list(named.values())
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tree = tree

    def without_tensors(self, kernels: Callable[[], AbstractContextManager[object]]) -> Compiled:
        """Return the call as a function of all of its tensors, without holding any of them."""
        module, forward, names, others, tree = self.module, self.forward, self.names, self.others, self.tree

        def run(state: list[Tensor], tensors: list[Tensor]) -> Any:
            given = iter(tensors)
            inputs, options = tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in others], tree)
            with kernels(), torch_private.reparametrize_module(module, dict(zip(names, state, strict=True))):
                return forward(*inputs, **options)

        return run


def _partition(*joint: Any, num_free: int, **options: Any) -> Any:
    """Split forward and backward; saving the first `num_free` inputs costs nothing."""
    options["static_lifetime_input_indices"] = list(range(num_free))
    return torch_private.partition_fn(*joint, **options)


def _empty_copies(tensors: list[Tensor]) -> list[Tensor]:
    return [
        tensor.new_empty_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _key(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return geometry(leaf), leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else id(leaf)
