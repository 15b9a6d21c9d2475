"""The ways by which autograd comes to the inputs of a graph.

Where a unit has several graphs, each way gets its gradient by itself. So autograd adds up those of an input that
several graphs use, in the order in which it would without graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LeafEdge:
    """A way by which autograd comes to a leaf: the node of an operation that uses it, and which of its inputs it is."""

    node: Any
    number: int
    leaf: Tensor


def edges_to_leaves(outputs: Sequence[Tensor]) -> list[LeafEdge]:
    """Return the ways to the leaves of autograd's graph of these outputs, in the order in which backward takes them."""
    found: list[LeafEdge] = []
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for number, (below, _) in enumerate(node.next_functions):
            leaf = getattr(below, "variable", None)
            if leaf is not None:
                found.append(LeafEdge(node, number, leaf))
            elif below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return sorted(found, key=lambda edge: (-edge.node._sequence_nr(), edge.number))


def gradients_by_edge(pairs: Sequence[tuple[Tensor, Tensor]], *, edges: Sequence[LeafEdge]) -> list[Tensor | None]:
    """Return the gradient of each leaf, or of each way to it if there are several, from (output, gradient) pairs."""
    leaves = list({id(edge.leaf): edge.leaf for edge in edges}.values())
    pieces: dict[tuple[Any, int], Tensor | None] = {}
    nodes = {edge.node for edge in edges} if len(leaves) < len(edges) else set()
    handles = [node.register_hook(partial(_note_pieces, node, pieces)) for node in nodes]
    try:
        outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return [pieces.get((edge.node, edge.number)) for edge in edges] if nodes else list(found)


def _note_pieces(node: Any, pieces: dict[tuple[Any, int], Tensor | None], grads: Any, _: Any) -> None:
    pieces.update({(node, number): grad for number, grad in enumerate(grads)})
