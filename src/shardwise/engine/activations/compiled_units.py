"""Compiles units with torch.compile, for both engines.

Each unit's own forward is compiled, and its hooks are not: gathers, casts and reduces stay outside, and units of one
class share their compiled code.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.engine.activations.recompute import replace_forward
from shardwise.plan import Plan
from shardwise.program.spec import ROOT


def check_compile(units: Mapping[str, object], *, plan: Plan) -> None:
    """Refuse a plan that compiles units of a model whose only unit is the root, which is not compiled."""
    if plan.compiler != "none" and not any(name != ROOT for name in units):
        raise InvalidModel(
            f"compile = {plan.compiler!r}: the model is one unit (units = {plan.units!r}), and only units inside it "
            "are compiled"
        )


def compile_units(modules: Mapping[str, nn.Module], *, plan: Plan) -> list[Callable[[], None]]:
    """Compile the plan's units in place; return the functions that undo it."""
    return [
        replace_forward(module, torch.compile(module.forward, backend=plan.compiler))
        for name, module in modules.items()
        if plan.compiles(name)
    ]
