"""A graph of operations as Inductor's code runs it: which results get memory, and for how long.

buffer   a value with memory: an input, the result of an external kernel (a matrix product, attention), or a value that
         a fused kernel writes
inlined  a value that a fused kernel computes without writing it; its readers read the buffers that it comes from
step     one kernel, external or fused

A fused kernel writes the graph's outputs, the inputs of external kernels, and values that are too expensive to compute
again in a later kernel (Inductor's limits: torch/_inductor/config.py, ir.py). Views share the memory of their base. A
buffer is freed after its last reader. A fused kernel writes a result over a buffer of equal size if no other result of
it and no later step reads that buffer (Inductor: `decide_inplace_update` in torch/_inductor/scheduler.py).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import OpOverload
from shardwise.models.trace.recorder import OpRecorder

# Inductor recomputes a value for each of several readers if it reads no more buffers than this
# (realize_reads_threshold).
_MOST_READS = 4
# Generated, but not fused with later operations: they write to the positions that their indices give.
_SCATTERS = ("index_put", "_unsafe_index_put", "index_add", "scatter", "scatter_add", "scatter_reduce")


class FusedGraph:
    """Called with the graph's inputs, it allocates and frees the buffers of each step under the recorder."""

    # Tells AOTAutograd to pass the inputs as a list, which the callee clears.
    _boxed_call = True

    def __init__(self, graph: fx.Graph, *, recorder: OpRecorder) -> None:
        self._recorder = recorder
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._outputs: Any = graph.output_node().args[0]
        self._owner: Any = graph.owning_module
        kernels = _Kernels(graph)
        self._steps = kernels.steps
        self._frees = _last_reads(kernels.steps, inputs=self._inputs, kept=kernels.buffers_of(graph.output_node()))

    def __call__(self, args: list[Any]) -> list[Any]:
        with torch_private.disable_current_modes():
            values: dict[fx.Node, Any] = dict(zip(self._inputs, args, strict=True))
            args.clear()
            self._free(values, self._frees[0])
            for step, frees in zip(self._steps, self._frees[1:], strict=True):
                if step.is_fused:
                    self._write(step, values, frees=frees)
                else:
                    self._call(step.nodes[0], values)
                    self._free(values, frees)
            return [self._value(output, values) for output in self._outputs]

    def _free(self, values: dict[fx.Node, Any], nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            del values[node]

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        args, options = self._value((node.args, node.kwargs), values)
        out = values[node] = node.target(*args, **options)  # type: ignore[operator]
        self._recorder.record_call(node.target, args, options, out)

    def _write(self, step: "_Step", values: dict[fx.Node, Any], *, frees: Iterable[fx.Node]) -> None:
        before = len(self._recorder.entries)
        written = [tree_map_only(Tensor, _like, node.meta["val"]) for node in step.nodes]
        values.update(zip(step.nodes, written, strict=True))
        read = [node for node in frees if node not in step.nodes]
        self._free(values, (node for node in read if node not in step.shared))
        self._recorder.record_written(tree_leaves(written), since=before)
        del written
        self._free(values, (node for node in frees if node in step.nodes or node in step.shared))

    def _value(self, wanted: Any, values: Mapping[fx.Node, Any]) -> Any:
        """Return the values of all nodes in `wanted`: buffers, and views of them."""
        return fx.node.map_arg(wanted, lambda node: self._value_of(node, values))

    def _value_of(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node in values:
            return values[node]
        if node.op == "get_attr":
            return getattr(self._owner, str(node.target))
        args, options = self._value((node.args, node.kwargs), values)
        return node.target(*args, **options)  # type: ignore[operator]


def _like(tensor: Any) -> Tensor:
    with tensor.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One kernel: the nodes that it writes, and the buffers that it reads.

    `shared`: buffers that several of its results read, so that none of these may be written over them.
    """

    nodes: tuple[fx.Node, ...]
    reads: frozenset[fx.Node]
    shared: frozenset[fx.Node]
    is_fused: bool


@dataclass(slots=True)
class _Kernels:
    """The buffers of a graph, and the steps that write them, in order."""

    graph: fx.Graph
    buffers: set[fx.Node] = field(default_factory=set)
    steps: list[_Step] = field(default_factory=list)
    # Inlined value or view → the buffers that it comes from.
    _reads: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    # The number of external kernels on the longest path to a node; only nodes of equal depth are fused.
    _depth: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            before = max((self._depth[source] for source in node.all_input_nodes), default=0)
            self._depth[node] = before + _is_called(node)
        for node in self.graph.nodes:
            self._reads[node] = frozenset().union(*(self.buffers_of(source) for source in node.all_input_nodes))
            if node.op == "placeholder" or _is_called(node) or (_is_fusible(node) and self._is_written(node)):
                self.buffers.add(node)
        self.steps.extend(self._in_order())

    def buffers_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the buffers that a reader of the node reads."""
        return frozenset((node,)) if node in self.buffers else self._reads[node]

    def _is_written(self, node: fx.Node) -> bool:
        readers = list(_readers(node))
        if any(not _is_fusible(reader) for reader in readers) or _name(node) in _SCATTERS:
            return True
        is_read_later = any(self._depth[reader] > self._depth[node] for reader in readers)
        is_costly = len(readers) > 1 and len(self._reads[node]) > _MOST_READS
        return is_read_later and (is_costly or _is_reduction(node))

    def _in_order(self) -> Iterator[_Step]:
        done = {node for node in self.buffers if node.op == "placeholder"}
        for node in self.graph.nodes:
            if node not in self.buffers or node in done:
                continue
            nodes = (node,) if _is_called(node) else self._fused_with(node, done=done)
            done.update(nodes)
            counts = Counter(read for one in nodes for read in self._reads[one] if read not in nodes)
            shared = frozenset(read for read, count in counts.items() if count > 1)
            yield _Step(nodes=nodes, reads=frozenset(counts), shared=shared, is_fused=not _is_called(node))

    def _fused_with(self, first: fx.Node, *, done: set[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the nodes that one kernel writes: they share buffers that they read, all of which exist already."""
        found = [first]
        for node in self.graph.nodes:
            is_alike = node in self.buffers and not _is_called(node) and self._depth[node] == self._depth[first]
            if is_alike and node not in done and node not in found:
                is_ready = self._reads[node] <= done | set(found)
                if is_ready and self._reads[node] & (self._reads[first] | set(found)):
                    found.append(node)
        return tuple(found)


def _last_reads(steps: Sequence[_Step], *, inputs: Iterable[fx.Node], kept: frozenset[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes that are freed before the first step and after each step: those last used there."""
    last = dict.fromkeys(inputs, 0)
    for number, step in enumerate(steps, start=1):
        last.update(dict.fromkeys((*step.reads, *step.nodes), number))
    frees: list[list[fx.Node]] = [[] for _ in range(len(steps) + 1)]
    for node, number in last.items():
        if node not in kept:
            frees[number].append(node)
    return frees


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a node's result, also those that read it through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        # getitem of a tuple.
        return node.op == "call_function"
    return _name(node) == "_unsafe_view" or any(
        result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns
    )


def _is_called(node: fx.Node) -> bool:
    """Return whether it is an external kernel, of a library or of torch, which Inductor calls."""
    target = node.target
    if not isinstance(target, OpOverload) or _is_view(node):
        return False
    return (
        target.overloadpacket in flop_registry
        or target in torch_private.fallbacks
        or target not in torch_private.lowerings
    )


def _is_fusible(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not _is_view(node) and not _is_called(node)


def _is_reduction(node: fx.Node) -> bool:
    """Return whether it has fewer elements than its largest input."""
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    most = max((source.numel() for source in sources if isinstance(source, Tensor)), default=0)
    return any(output.numel() < most for output in tree_leaves(node.meta["val"]))


def _name(node: fx.Node) -> str:
    return str(node.target.overloadpacket.__name__) if isinstance(node.target, OpOverload) else ""
