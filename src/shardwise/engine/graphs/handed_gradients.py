"""Gradients of parameters that a replayed backward hands to its unit at once, past autograd's nodes.

Otherwise each gradient is made a tensor that may be held, given to a node of autograd, and taken off its parameter. The
nodes still run, without a gradient: each comes after everything that uses its parameter, so its hook
(hooks/step_hooks.py) tells when the unit is complete, and what other uses have brought lies in `p.grad` by then and is
added (Gradients.take_off).
A gradient goes by its node where somebody else could see the difference: a hook on the parameter or on the node, or a
backward that asks for certain gradients.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.base.torch_internals import torch_private
from shardwise.engine.core.flat_gradients import Gradients
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.graphs.static_place import StaticPlace
from shardwise.engine.hooks.step_hooks import UnitGrads

Edges = Sequence[tuple[Any, int]]
"""The nodes that follow a node of autograd, as its `next_functions`."""


class Handed(dict[int, Tensor]):
    """Gradients in the memory of graphs, by the number of the parameter in its buffer, until they are taken."""

    __slots__ = ("__weakref__",)


def hand_over(
    places: list[StaticPlace | None],
    params: Sequence[Any],
    edges: Edges,
    *,
    takers: dict[int, tuple[Gradients, int]],
    grads: UnitGrads[Any],
) -> list[tuple[Handed, list[StaticPlace]]]:
    """Hand gradients of a unit's parameters to it; return what holds them until they are taken, and their places.

    places    the gradients; those that are handed over become None
    params    what has them; edges: the nodes to which autograd would give them
    takers    what takes a parameter's gradient, and the parameter's number there, by the parameter's id
    """
    handed: dict[Gradients, tuple[Handed, list[StaticPlace]]] = {}
    if grads.closed:
        return []
    expected, unheld, will_run = grads.expected, _refs_of_unheld_node(), torch_private.will_engine_execute_node
    with unguarded():
        for position, (place, parameter, (node, _)) in enumerate(zip(places, params, edges, strict=True)):
            if place is None or id(parameter) not in expected or sys.getrefcount(node) > unheld:
                continue
            # The unit's own hook tells that the parameter is done; others are to see a gradient.
            if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks) > 1:
                continue
            try:
                if not will_run(node):
                    continue
            except RuntimeError:
                # This gradient is asked for, by torch.autograd.grad.
                continue
            gradients, index = takers[id(parameter)]
            if gradients not in handed:
                handed[gradients] = Handed(), []
            found, own = handed[gradients]
            found[index] = found[index] + place.tensor if index in found else place.tensor
            own.append(place)
            places[position] = None
    for gradients, (found, _) in handed.items():
        gradients.hand(found)
    return list(handed.values())


@cache
def _refs_of_unheld_node() -> int:
    """Return the references to a node that nobody else holds, as `hand_over` counts them: who hooks a node holds it."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        made: Any = torch.zeros(1, requires_grad=True) * 1
    edges = made.grad_fn.next_functions
    return next(sys.getrefcount(node) for _, (node, _) in zip((0,), edges, strict=False))
