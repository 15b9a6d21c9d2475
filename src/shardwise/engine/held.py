"""What a rank holds for a model between steps, in bytes by category."""

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import engine_of
from shardwise.placement import SHARDED


def held_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Bytes that this rank holds now: `params`, `gathered`, `grads` and `optim`; and those on the `host`.

    params    the full buffers of replicated parameters, the slices of sharded ones that compute in fp32
    gathered  full buffers of sharded parameters that are not freed
    grads     reduced gradients
    optim     the optimizer's state, and its fp32 master where that is a copy of its own
    host      all of the above that the plan offloads, gradients left out
    """
    held = {"params": 0, "gathered": 0, "grads": 0, "optim": 0, "host": 0}
    # A bucket's gradients share one storage.
    grads: dict[int, int] = {}
    for flat in engine_of(model).flats:
        full_bytes = flat.full.untyped_storage().nbytes()
        sharded = flat.placement.params is SHARDED
        held["gathered" if sharded else "params"] += full_bytes
        states = [
            value
            for part in flat.owned
            for value in (optimizer.state.get(part.parameter, {}) if optimizer else {}).values()
            if isinstance(value, Tensor)
        ]
        if flat.host is not None:
            held["host"] += flat.master.nbytes + sum(value.nbytes for value in states)
            held["host"] += flat.staged.nbytes if flat.staged is not flat.master else 0
            continue
        held["optim"] += sum(value.nbytes for value in states)
        if not flat.aliased:
            is_the_parameter = sharded and flat.full.dtype == flat.master_dtype
            held["params" if is_the_parameter else "optim"] += flat.master.nbytes
        for part in flat.owned:
            if part.parameter.grad is not None:
                storage = part.parameter.grad.untyped_storage()
                grads[storage.data_ptr()] = storage.nbytes()
    held["grads"] = sum(grads.values())
    return held
