"""Observes beneath any engine which dtypes a step computes in, and which collectives it issues.

Every engine ends in the same operators of torch: a matrix product is `aten::mm`, and a collective is one of c10d's,
whether our engine, DDP's reducer or `fully_shard` issued it. A dispatch mode sees them, in backward too, since
autograd's threads inherit the mode.

    collective       bytes B of       a rank sends, in a ring of n
    all_reduce       the tensor       2 · B · (n-1)/n
    all_gather       the output       B · (n-1)/n
    reduce_scatter   the input        B · (n-1)/n
    all_to_all       the input        B · (n-1)/n
    broadcast        the tensor       B

These are the bytes that a ring has to send, the same measure for all engines; a backend may choose another algorithm.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import TorchDispatchMode
from shardwise.comm.groups.dtensor import dtensor_types

# Operator → (collective, index of the argument whose bytes are counted).
_COLLECTIVES: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
}
# Operator → collective, as DTensors issue them: the input is the first argument, and the group is given by its name.
_FUNCTIONAL: Mapping[str, str] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::broadcast": "broadcast",
}
_COMPUTES = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward",
    "aten::_scaled_dot_product", "aten::scaled_dot_product",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ObservedRun:
    """The dtypes of matrix products, collective → how often, and the bytes that this rank had to send."""

    computed_in: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes every operator of the steps in its block, backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed = ObservedRun()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dtensor_types()) for kind in types):
            # A DTensor dispatches again, with plain tensors.
            return NotImplemented
        name = func._schema.name
        if name in _COLLECTIVES:
            collective, index = _COLLECTIVES[name]
            group = next(value for value in args if _is_group(value))
            self._count(collective, args[index], num_ranks=dist.ProcessGroup.unbox(group).size())
        elif name in _FUNCTIONAL:
            group_name: Any = [value for value in args if isinstance(value, str)][-1]
            num_ranks = torch_private.resolve_process_group(group_name).size()
            # The output of a gather is n times its input.
            times = num_ranks if _FUNCTIONAL[name] == "all_gather" else 1
            self._count(_FUNCTIONAL[name], args[0], num_ranks=num_ranks, times=times)
        elif name.startswith(_COMPUTES):
            # The factors come first, then what attention keeps for its backward (in float32).
            self.observed.computed_in |= {dtype_name(value) for value in args[:3] if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))

    def _count(self, collective: str, tensors: Any, *, num_ranks: int, times: int = 1) -> None:
        """Count a collective of `times` the bytes of `tensors`."""
        num_bytes = times * sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
        once = (num_ranks - 1) / num_ranks
        share = {"all_reduce": 2 * once, "broadcast": min(1.0, num_ranks - 1)}.get(collective, once)
        self.observed.calls[collective] += 1
        self.observed.sent_bytes += share * num_bytes


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(torch_private.script_type(value))


@contextmanager
def stepped_dtypes(optimizer: Optimizer) -> Iterator[dict[str, set[str]]]:
    """Yield master, grads, optim → the dtypes of the optimizer's parameters, gradients and state, as a step finds them.

    Step counters are left out.
    """
    found: dict[str, set[str]] = {"master": set(), "grads": set(), "optim": set()}

    def look(*_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            found["master"].add(dtype_name(parameter))
            if parameter.grad is not None:
                found["grads"].add(dtype_name(parameter.grad))
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step" and isinstance(value, Tensor):
                    found["optim"].add(dtype_name(value))

    handle = optimizer.register_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
