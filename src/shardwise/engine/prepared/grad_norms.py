"""Norms and clipping of gradients whose slices lie on several ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.comm.groups.rank_progress import waiting_in
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_errors import updated_in_backward
from shardwise.engine.core.step_events import announce
from shardwise.engine.engine import EngineParts
from shardwise.plan.placement import REPLICATED, Where


@torch.no_grad()
def clip_grad_norm_(
    engine: EngineParts,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    parameters: Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm that they had, on every rank.

    Collective. Like torch's function, but over the whole gradient, on whatever ranks its slices are. With `parameters`
    (some of the model's), only their gradients are scaled, by their norm. Norms add up in float64, so that the result
    hardly depends on how the gradient is cut into slices.
    """
    _between_steps(engine, what="clip_grad_norm_")
    named = chosen(engine.core.model, parameters)
    by_axes = {axes: _grads(flats, named) for axes, flats in _by_axes(engine).items()}
    total = _norm(by_axes, engine=engine, norm_type=float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise InvalidData(f"the norm of the gradients is {total.item()}: they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in by_axes.values():
        # Slices of some units may be in host memory.
        for device in {grad.device for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.device == device], scale.to(device, grads[0].dtype))
    return total.to(torch.float32)


@torch.no_grad()
def clip_grad_value_(engine: EngineParts, clip_value: float, *, parameters: Iterable[Tensor] | None = None) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value], like torch's function of this name.

    With `parameters` (some of the model's), only of their gradients.
    """
    if not clip_value >= 0:
        raise InvalidData(f"clip_value = {clip_value!r}: must be a number of at least 0")
    _between_steps(engine, what="clip_grad_value_")
    grads = _grads(engine.core.flats, chosen(engine.core.model, parameters))
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


@torch.no_grad()
def grad_norms(engine: EngineParts, *, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each parameter's whole gradient, the same on every rank; parameters without one are left out.

        for name, norm in shardwise.grad_norms(model).items():      # between backward and step
            log(name, norm)

    Collective, and it waits for the device.
    """
    _between_steps(engine, what="grad_norms")
    power = float(norm_type)
    by_axes = _by_axes(engine)
    parts = []
    for axes, flats in by_axes.items():
        parts.append(_power_sums(flats, engine, power=power))
        _reduce(parts[-1], axes, engine=engine, power=power, what="grad_norms")
    sums = torch.cat(parts)
    names = [name for flats in by_axes.values() for flat in flats for name in flat.names]
    found = {
        name: total if math.isinf(power) else total ** (1 / power)
        for name, (total, has) in zip(names, sums.tolist(), strict=True)
        if has
    }
    return {name: found[name] for name, _ in engine.core.model.named_parameters() if name in found}


def chosen(model: nn.Module, parameters: Iterable[Tensor] | None) -> set[int] | None:
    """Return the ids of these parameters of the model; None for all."""
    if parameters is None:
        return None
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in (given := [parameters] if isinstance(parameters, Tensor) else list(parameters)):
        if id(parameter) not in own:
            raise InvalidModel(
                f"parameters: one of shape {tuple(parameter.shape)} is not the model's; give parameters of the model "
                "(model.head.parameters()), not slices from optimizer.param_groups or another model's"
            )
    return {id(parameter) for parameter in given}


def _between_steps(engine: EngineParts, *, what: str) -> None:
    """Refuse `what` inside of a step; take over values that were written into `p.grad`."""
    if engine.core.followed.plan.updates_in_backward:
        raise updated_in_backward(what)
    engine.check_between_steps(what=what)
    announce(engine.core.setting.events.gradients_asked)


def _by_axes(engine: EngineParts) -> dict[Where, list[FlatParams]]:
    """Return the buffers by the axes over which they are stepped in parts; in the same order on all ranks."""
    flats = engine.core.flats
    by_axes = {where: [flat for flat in flats if flat.placement.optim is where] for where in Where}
    return {where: found for where, found in by_axes.items() if found or where is REPLICATED}


def _grads(flats: list[FlatParams], named: set[int] | None) -> list[Tensor]:
    """Return the gradients that this rank's optimizer steps these parameters by."""
    return [
        part.parameter.grad
        for flat in flats
        for part in flat.master.owned
        if part.parameter.grad is not None and (named is None or id(flat.params[part.index]) in named)
    ]


def _norm(by_axes: dict[Where, list[Tensor]], *, engine: EngineParts, norm_type: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for axes, grads in by_axes.items():
        others = _power_sum(grads, norm_type=norm_type, device=engine.device)
        _reduce(others, axes, engine=engine, power=norm_type, what="clip_grad_norm_")
        total = torch.maximum(total, others) if math.isinf(norm_type) else total + others
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _reduce(sums: Tensor, axes: Where, *, engine: EngineParts, power: float, what: str) -> None:
    """Combine sums over parts (maxima for p = ∞) from all ranks that hold parts."""
    operation = dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM
    groups = engine.core.setting.groups
    for is_cut, group in ((axes.is_sharded_across, groups.replicate), (axes.is_sharded, groups.reduce)):
        if is_cut:
            with waiting_in(what):
                dist.all_reduce(sums, op=operation, group=group.handle)


def _norms(grads: list[Tensor], power: float, *, device: torch.device) -> Tensor:
    norms = list(torch._foreach_norm(grads, power, dtype=torch.float64))
    if len({grad.device for grad in grads}) > 1:
        norms = [norm.to(device) for norm in norms]
    return torch.stack(norms).to(device)


def _power_sum(grads: list[Tensor], *, norm_type: float, device: torch.device) -> Tensor:
    """Return Σ |g|^p, or the maximum for p = ∞."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = _norms(grads, norm_type, device=device)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _power_sums(flats: list[FlatParams], engine: EngineParts, *, power: float) -> Tensor:
    """Return, for each parameter, Σ |g|^p of this rank's part (the maximum for p = ∞), and whether there is any."""
    sums = torch.zeros(sum(len(flat.names) for flat in flats), 2, dtype=torch.float64, device=engine.device)
    places, grads = [], []
    first = 0
    for flat in flats:
        for part in flat.master.owned:
            if part.parameter.grad is not None:
                places.append(first + part.index)
                grads.append(part.parameter.grad)
        first += len(flat.names)
    if grads:
        norms = _norms(grads, power, device=engine.device)
        sums[places, 0] = norms if math.isinf(power) else norms**power
        sums[places, 1] = 1
    return sums
