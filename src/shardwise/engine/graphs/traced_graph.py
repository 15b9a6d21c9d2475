"""A traced graph: what torch's tracer makes of a unit, or of a part of it, as a function of explicit inputs.

Its inputs are parameters, buffers, arguments, tensors that were read from anywhere, and numbers. Compiled code calls it
in the place of the Python that was traced, and does what else that did. A graph belongs to one prepared model.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from shardwise.base.torch_internals import torch_private
from shardwise.comm.groups.groups import num_collectives
from shardwise.engine.activations.recompute import draws_nothing
from shardwise.engine.core.parameters import unguarded

# Larger parameters are compared by torch's count of writes.
_MOST_COMPARED_BYTES = 2**20

# Times after which something is taken to be so.
_OFTEN = 2

Outputs = Sequence[Any]
Run = Callable[["TracedGraph", tuple[Any, ...]], Outputs]


class _Running(threading.local):
    """How the traced graphs of the unit that this thread runs are run; None outside of units."""

    run: Run | None = None


_running = _Running()


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Let `run` run the traced graphs that are called in this block."""
    outer, _running.run = _running.run, run
    try:
        yield
    finally:
        _running.run = outer


class TracedGraph:
    """One traced graph.

    why_not      the reason why it is not recorded, in one line; "" if it may be
    in_place     the numbers of the inputs that are read and written where they are; all others are copied to a place
    written      the numbers of the inputs that it writes into; known once it has run
    counted      those whose writes torch counts: not statistics that BatchNorm writes, which backward may still save
    kept         the numbers of the outputs that are still held when the next pass begins, and how often that was seen
    numbers      computes the outputs that are numbers from the inputs, such as a counter; other outputs are None
    free         the numbers of the inputs that only such outputs depend on

    `writes_python`: whether the code around it writes into objects of Python that were there before.
    """

    def __init__(
        self, module: GraphModule, *, compiled: Callable[..., Outputs] | None, writes_python: bool = False
    ) -> None:
        self.writes_python = writes_python
        self._recomputes = _keep_checkpoints(module)
        self.function: Callable[..., Outputs] = compiled or module.forward
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        # In place are parameters and buffers; until it has run, it may write any of the buffers.
        self.in_place = {number for number, node in enumerate(placeholders) if _is_static(node.meta)}
        params = (isinstance(node.meta.get("example_value"), nn.Parameter) for node in placeholders)
        self.buffers = self.in_place - {number for number, is_param in enumerate(params) if is_param}
        self.written: set[int] = set()
        self.counted: set[int] = set()
        self.numbers, self.free = _numbers(module)
        self.kept: Counter[int] = Counter()
        self._moved: Counter[int] = Counter()
        self.has_run = False
        self.why_not = ""

    def __call__(self, *inputs: Any) -> Outputs:
        run = _running.run
        return self.function(*inputs) if run is None else run(self, inputs)

    def note_moved(self, numbers: Iterable[int]) -> None:
        """Note that these inputs are not where they were: buffers that are replaced again and again are copied."""
        for number in self.buffers.intersection(numbers) - self.written:
            self._moved[number] += 1
            if self._moved[number] == _OFTEN:
                self.in_place.discard(number)

    def copied_outputs(self) -> list[int]:
        """Return the numbers of the outputs that are copied for those who keep them."""
        return [number for number, count in self.kept.items() if count >= _OFTEN]

    def observe(
        self, run: Callable[..., Outputs], inputs: Sequence[Any], *, random_state: Callable[[], Any]
    ) -> Outputs:
        """Run it in the ordinary way, and note what it writes."""
        tensors = {number: one for number, one in enumerate(inputs) if isinstance(one, Tensor)}
        before, drawn = _contents(tensors), random_state() if self._recomputes else None
        issued = _num_collectives()
        outputs = run(*inputs)
        after = _contents(tensors)
        self.written |= {number for number in tensors if not _equal(before[number], after[number])}
        self.counted |= {number for number in tensors if before[number][0] != after[number][0]}
        if any(tensors[number].requires_grad for number in self.written):
            self.why_not = "it writes into its inputs"
        if self._recomputes and random_state() != drawn:
            self.why_not = "a recomputation of a part of it draws random numbers"
        if _num_collectives() != issued:
            self.why_not = "it communicates"
        self.has_run = True
        return outputs


def _num_collectives() -> list[int]:
    """Return how many collectives were issued, for each process group."""
    return [num_collectives(group) for group in torch_private.world.pg_map] if dist.is_initialized() else []


def _contents(tensors: dict[int, Tensor]) -> dict[int, tuple[int, Tensor | None]]:
    """Return the versions of tensors, and copies: torch counts neither what BatchNorm writes nor writes to `.data`."""
    with unguarded(), torch.no_grad():
        return {
            number: (
                0 if one.is_inference() else one._version,
                None if isinstance(one, nn.Parameter) and one.nbytes > _MOST_COMPARED_BYTES else one.detach().clone(),
            )
            for number, one in tensors.items()
        }


def _equal(before: tuple[int, Tensor | None], after: tuple[int, Tensor | None]) -> bool:
    if before[0] != after[0] or before[1] is None or after[1] is None:
        return before[0] == after[0]
    return bool(((before[1] == after[1]) | ((before[1] != before[1]) & (after[1] != after[1]))).all())


def _is_static(meta: dict[str, Any]) -> bool:
    """Return whether an input is a parameter or a buffer of the module."""
    return "_dynamo_static_input_type" in (meta.get("tensor_dict") or ())


def _numbers(module: GraphModule) -> tuple[Callable[..., Outputs] | None, set[int]]:
    """Return what `TracedGraph.numbers` and `free` are; None where no output is a number."""
    own, copies = Graph(), dict[Node, Node]()
    used: set[Node] = set()
    nodes = list(module.graph.nodes)
    for node in nodes[:-1]:
        is_number = not isinstance(node.meta.get("example_value"), Tensor) and node.op != "get_attr"
        if node.op == "placeholder":
            copies[node] = own.node_copy(node)
        elif is_number and node.op == "call_function" and all(_is_number(one, copies) for one in node.all_input_nodes):
            copies[node] = own.node_copy(node, copies.__getitem__)
        else:
            used.update(node.all_input_nodes)
    outputs = [one if _is_number(one, copies) else None for one in nodes[-1].args[0]]
    own.output(tuple(copies[one] if isinstance(one, Node) else one for one in outputs))
    for node in reversed(nodes[:-1]):
        if node in used and node in copies:
            used.update(node.all_input_nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    free = {at for at, node in enumerate(placeholders) if _is_number(node, copies) and node not in used}
    has_numbers = any(one is not None for one in outputs)
    return (GraphModule(module, own).forward if has_numbers else None), free


def _is_number(one: Any, computed: Container[Node]) -> bool:
    if not isinstance(one, Node):
        return isinstance(one, int | float)
    return one in computed and not isinstance(one.meta.get("example_value"), Tensor)


def _keep_checkpoints(module: GraphModule) -> bool:
    """Let torch.utils.checkpoint calls in a graph recompute, as they do in Python; return whether there are any.

    The tracer replaces them by an operator that only marks what a compiler may recompute.
    """
    nodes = [node for node in module.graph.nodes if node.target is torch.ops.higher_order.tag_activation_checkpoint]
    for node in nodes:
        node.target = _checkpointed
    if nodes:
        module.recompile()
    return bool(nodes)


def _checkpointed(body: Any, *inputs: Any, **options: Any) -> Any:
    options["preserve_rng_state"] = options.get("preserve_rng_state", True) and not draws_nothing()
    return checkpoint(body, *inputs, **{"use_reentrant": False, **options})
