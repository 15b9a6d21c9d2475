"""Gradients by name, wherever their slices lie: their norms, and a bound for each element."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.rank_progress import waiting_in
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_events import announce
from shardwise.engine.engine import Engine, engine_of
from shardwise.errors import InvalidData
from shardwise.plan.placement import SHARDED


@torch.no_grad()
def grad_norms(model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
    """Parameter → the norm of its whole gradient, in the model's order; those without a gradient are left out.

    Collective. Σ |g|^p adds up over slices, in float64; it waits for the device once.
    """
    engine = _between_steps(model, what="grad_norms")
    power = float(norm_type)
    everywhere, sliced = (
        [f for f in engine.flats if (f.placement.optim is SHARDED) == is_so] for is_so in (False, True)
    )
    sums = _power_sums(everywhere, engine, power=power)
    if sliced:
        slices = _power_sums(sliced, engine, power=power)
        operation = dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM
        with waiting_in("grad_norms"):
            dist.all_reduce(slices, op=operation, group=engine.groups.reduce.handle)
        sums = torch.cat([sums, slices])
    names = [name for flat in (*everywhere, *sliced) for name in flat.names]
    found = {
        name: total if math.isinf(power) else total ** (1 / power)
        for name, (total, has) in zip(names, sums.tolist(), strict=True)
        if has
    }
    return {name: found[name] for name, _ in model.named_parameters() if name in found}


@torch.no_grad()
def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Every element of the gradients between -clip_value and clip_value. Each rank does so with its own slices."""
    if not clip_value >= 0:
        raise InvalidData(f"clip_value = {clip_value!r}: must be a number of at least 0")
    engine = _between_steps(model, what="clip_grad_value_")
    grads = [part.parameter.grad for flat in engine.flats for part in flat.owned if part.parameter.grad is not None]
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


def _between_steps(model: nn.Module, *, what: str) -> Engine:
    """The engine, once what was written into `p.grad` is in the slices."""
    engine = engine_of(model)
    engine.check_between_steps(what=what)
    announce(engine.core.events.gradients_asked)
    return engine


def _power_sums(flats: list[FlatParams], engine: Engine, *, power: float) -> Tensor:
    """For each parameter Σ |g|^p over what this rank holds of it (the maximum for p = ∞), and whether it holds any."""
    sums = torch.zeros(sum(len(flat.names) for flat in flats), 2, dtype=torch.float64, device=engine.device)
    places, grads = [], []
    first = 0
    for flat in flats:
        for part in flat.owned:
            if part.parameter.grad is not None:
                places.append(first + part.index)
                grads.append(part.parameter.grad)
        first += len(flat.names)
    if grads:
        norms = torch.stack(torch._foreach_norm(grads, power, dtype=torch.float64)).to(engine.device)
        sums[places, 0] = norms if math.isinf(power) else norms**power
        sums[places, 1] = 1
    return sums
