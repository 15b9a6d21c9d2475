"""Which traces a plan needs: how each of its units runs."""

from shardwise.plan import Plan
from shardwise.spec import ROOT


def is_compiled(plan: Plan, *, unit: str) -> bool:
    """Whether inductor makes kernels of what a unit computes.

    The root is not compiled, nor is what recomputes selectively: torch.compile leaves alone what runs under a dispatch
    mode. aot_eager runs what it has captured as it is.
    """
    return plan.compile == "inductor" and unit != ROOT and plan.recompute_of(unit) != "selective"
