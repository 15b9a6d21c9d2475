"""The norm of gradients that lie in slices on many ranks."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.rank_progress import waiting_in
from shardwise.engine.core.step_events import announce
from shardwise.engine.engine import Engine, engine_of
from shardwise.errors import InvalidData
from shardwise.plan.placement import SHARDED


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; the norm they had, the same on every rank.

    Collective. As torch's, but of the whole gradient: norms add up in float64, so that the result hardly depends on
    how the gradient is cut into slices.
    """
    engine = engine_of(model)
    engine.check_between_steps(what="clip_grad_norm_")
    announce(engine.core.events.gradients_asked)
    everywhere, slices = (_grads(engine, sharded=sharded) for sharded in (False, True))
    total = _norm(everywhere, slices, engine=engine, norm_type=float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise InvalidData(f"the norm of the gradients is {total.item()}: they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in (everywhere, slices):
        if grads:
            # Slices may lie in host memory.
            torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
    return total.to(torch.float32)


def _grads(engine: Engine, *, sharded: bool) -> list[Tensor]:
    """The gradients that this rank's optimizer steps by: those of its own slices, or those that all ranks hold."""
    grads = (
        part.parameter.grad
        for flat in engine.flats
        if (flat.placement.optim is SHARDED) == sharded
        for part in flat.owned
    )
    return [grad for grad in grads if grad is not None]


def _norm(everywhere: list[Tensor], slices: list[Tensor], *, engine: Engine, norm_type: float) -> Tensor:
    total = _power_sum(everywhere, norm_type=norm_type, device=engine.device)
    if any(flat.placement.optim is SHARDED for flat in engine.flats):
        others = _power_sum(slices, norm_type=norm_type, device=engine.device)
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        with waiting_in("clip_grad_norm_"):
            dist.all_reduce(others, op=operation, group=engine.groups.reduce.handle)
        total = torch.maximum(total, others) if math.isinf(norm_type) else total + others
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _power_sum(grads: list[Tensor], *, norm_type: float, device: torch.device) -> Tensor:
    """Σ |g|^p, or the maximum for p = ∞; what adds up over slices."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float64)).to(device)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
