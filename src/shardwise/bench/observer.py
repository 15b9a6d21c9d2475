"""What a step does, seen from under any engine: the dtypes it computes in, and the collectives it issues.

Every engine ends in the same operators of torch: a matrix product is `aten::mm`, whoever wrote the layer, and a
collective is one of c10d's, whoever issued it: our engine, the reducer inside of DDP, or `fully_shard`. They are seen
as the dispatcher hands them on, backward's too, since autograd's threads take the mode along.

    collective       bytes B of                    a rank sends, in a ring of n
    all_reduce       the tensor                    2 · B · (n-1)/n
    all_gather       what comes out                B · (n-1)/n
    reduce_scatter   what goes in                  B · (n-1)/n
    all_to_all       what goes in                  B · (n-1)/n
    broadcast        the tensor                    B

That is what has to be sent, by which engines can be compared; a backend may choose another way.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.comm.dtensor import dtensor_types


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective:
    """`argument`: the index of what is counted; `sent`: the share of its bytes that a rank of n sends."""

    name: str
    argument: int
    sent: Callable[[int], float]


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _once(n: int) -> float:
    return (n - 1) / n


def _all(n: int) -> float:
    # A job of one has nobody to send to.
    return min(1.0, n - 1)


_COLLECTIVES: Mapping[str, _Collective] = {
    "c10d::allreduce_": _Collective(name="all_reduce", argument=0, sent=_twice),
    "c10d::allreduce_coalesced_": _Collective(name="all_reduce", argument=0, sent=_twice),
    "c10d::_allgather_base_": _Collective(name="all_gather", argument=0, sent=_once),
    "c10d::allgather_": _Collective(name="all_gather", argument=0, sent=_once),
    "c10d::allgather_into_tensor_coalesced_": _Collective(name="all_gather", argument=0, sent=_once),
    "c10d::_reduce_scatter_base_": _Collective(name="reduce_scatter", argument=1, sent=_once),
    "c10d::reduce_scatter_": _Collective(name="reduce_scatter", argument=1, sent=_once),
    "c10d::reduce_scatter_tensor_coalesced_": _Collective(name="reduce_scatter", argument=1, sent=_once),
    "c10d::alltoall_base_": _Collective(name="all_to_all", argument=1, sent=_once),
    "c10d::broadcast_": _Collective(name="broadcast", argument=0, sent=_all),
}
# The same, as DTensors issue them: what goes in is the first argument, and the group is given by its name.
_FUNCTIONAL: Mapping[str, _Collective] = {
    "_c10d_functional::all_reduce": _Collective(name="all_reduce", argument=0, sent=_twice),
    "_c10d_functional::all_reduce_": _Collective(name="all_reduce", argument=0, sent=_twice),
    # What comes out is n times what goes in.
    "_c10d_functional::all_gather_into_tensor": _Collective(name="all_gather", argument=0, sent=lambda n: n * _once(n)),
    "_c10d_functional::reduce_scatter_tensor": _Collective(name="reduce_scatter", argument=0, sent=_once),
    "_c10d_functional::broadcast": _Collective(name="broadcast", argument=0, sent=_all),
}
_COMPUTES = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward",
    "aten::_scaled_dot_product", "aten::scaled_dot_product",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ObservedRun:
    """What was seen: dtypes that matrix products took, collective → how often, and what this rank had to send."""

    computed_in: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of the steps in here, also those of backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed = ObservedRun()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dtensor_types()) for kind in types):
            # What it makes of itself comes here again, in plain tensors.
            return NotImplemented
        name = func._schema.name
        if name in _COLLECTIVES:
            self._count(_COLLECTIVES[name], args, num_ranks=_group(args).size())
        elif name in _FUNCTIONAL:
            self._count(_FUNCTIONAL[name], args, num_ranks=_named_group(args).size())
        elif name.startswith(_COMPUTES):
            # What is multiplied comes first; what attention keeps for its backward (in float32) comes after it.
            self.observed.computed_in |= {dtype_name(value) for value in args[:3] if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))

    def _count(self, collective: _Collective, args: Any, *, num_ranks: int) -> None:
        tensors = [leaf for leaf in tree_leaves(args[collective.argument]) if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.observed.calls[collective.name] += 1
        self.observed.sent_bytes += collective.sent(num_ranks) * num_bytes


def _group(args: Iterable[Any]) -> dist.ProcessGroup:
    """The group among the arguments, which differ in where they have it."""
    boxed = next(
        value for value in args if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
    )
    return dist.ProcessGroup.unbox(boxed)


def _named_group(args: Iterable[Any]) -> dist.ProcessGroup:
    names: list[Any] = [value for value in args if isinstance(value, str)]
    return torch._C._distributed_c10d._resolve_process_group(names[-1])


@contextmanager
def stepped_dtypes(optimizer: Optimizer) -> Iterator[dict[str, set[str]]]:
    """master, grads, optim → the dtypes of what the optimizer steps, steps by and keeps, as a step finds them.

    Its counters are left out: they count.
    """
    found: dict[str, set[str]] = {"master": set(), "grads": set(), "optim": set()}

    def look(*_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            found["master"].add(dtype_name(parameter))
            if parameter.grad is not None:
                found["grads"].add(dtype_name(parameter.grad))
            kept = optimizer.state.get(parameter, {})
            found["optim"] |= {dtype_name(value) for key, value in kept.items() if _is_state(key, value)}

    handle = optimizer.register_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _is_state(key: str, value: object) -> bool:
    return key != "step" and isinstance(value, Tensor)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
