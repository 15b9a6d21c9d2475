"""The memory of optimizer state: when it is allocated, and on which device it lies."""

from collections.abc import Callable, Collection
from inspect import signature

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.engine.core.parameters import unguarded
from shardwise.engine.optimizer.known import ELEMENTWISE

# Tensors that move between two calls that return memory to the device.
_MOVED_TOGETHER = 16


def allocate_states(optimizer: Optimizer, *, without: Collection[int] = ()) -> None:
    """Allocate the state that the first update of one of torch's own optimizers would allocate.

    `without`: ids of parameters that are left out.

    Their `_init_group` allocates the state of each parameter that has a gradient; it is given gradients without memory.
    The state of SGD is its first gradient, so it cannot be allocated here.
    """
    initialise = getattr(optimizer, "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or initialise is None:
        return
    # Its arguments are the group and the lists that the update would use.
    num_lists = len(signature(initialise).parameters) - 1
    # An owned matrix is guarded between updates; only its shape is read here.
    with unguarded():
        for group in optimizer.param_groups:
            left = [p for p in group["params"] if id(p) not in without]
            made = [p for p in left if p.grad is None and p.requires_grad and not optimizer.state.get(p)]
            for parameter in made:
                parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            initialise({**group, "params": left}, *([] for _ in range(num_lists)))
            for parameter in made:
                parameter.grad = None


def move_states(optimizer: Optimizer, *, device: torch.device, release_memory: Callable[[], None]) -> None:
    """Allocate the state on a device again, a few tensors at a time, so that its scattered memory can be given back.

    Only for torch's own optimizers: others may keep further references to their state. No update may be in flight.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    states = [
        (state, key)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.device.type == device.type
    ]
    apart = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for number, (state, key) in enumerate(sorted(states, key=lambda place: place[0][place[1]].data_ptr())):
        if number % _MOVED_TOGETHER == 0:
            release_memory()
        try:
            state[key] = _copy(state[key], apart=apart)
        except torch.OutOfMemoryError:
            # Where it lies it does no harm.
            break
    release_memory()


def _copy(tensor: Tensor, *, apart: torch.cuda.Stream | None) -> Tensor:
    """Return a copy in new memory: that of another stream is not what steps have left between other state."""
    with torch.cuda.stream(apart):
        copy = torch.empty_like(tensor)
    if apart is not None:
        current = torch.cuda.current_stream(tensor.device)
        # Under deterministic algorithms torch fills new memory with NaN, on the stream that it belongs to.
        current.wait_stream(apart)
        copy.record_stream(current)
    return copy.copy_(tensor)


def suit_devices(optimizer: Optimizer, *, device: torch.device | None) -> None:
    """Let the optimizer's options and step counts suit the device of the update; None: each parameter's own device.

    As where torch loads a state, a step count that kernels read is on their device. For parameters that are stepped in
    host memory, capturable kernels and a rate on a GPU are no use: torch refuses both.
    """
    with unguarded():
        for group in optimizer.param_groups:
            stepped_on = {(device or parameter.device).type for parameter in group["params"]}
            if group.get("capturable") and "cpu" in stepped_on:
                group["capturable"], group["lr"] = False, float(group["lr"])
            if not (group.get("capturable") or group.get("fused")):
                continue
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(device or parameter.device)
