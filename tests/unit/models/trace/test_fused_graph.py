"""Which results of a compiled graph get memory: those of products, and what leaves a fused kernel."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.models.trace.fused_graph import FusedGraph
from shardwise.models.trace.recorder import Born, Did, Died, OpRecorder

SIZE = 8


def run(function: Callable[..., Tensor], num_inputs: int) -> str:
    """What happens: `+` and `-` for memory that comes and goes, and the names of library kernels."""
    with FakeTensorMode():
        inputs = [torch.empty(SIZE, SIZE) for _ in range(num_inputs)]
        graph = make_fx(function)(*inputs).graph
    recorder = OpRecorder(scratch={}, in_fp32={})
    (result,) = FusedGraph(_as_list(graph), recorder=recorder)([*inputs])
    assert result.shape == (SIZE, SIZE)
    words = []
    for entry in recorder.entries:
        match entry:
            case Born():
                words.append("+")
            case Died():
                words.append("-")
            case Did():
                words.append(entry.name)
    return " ".join(words)


def _as_list(graph: torch.fx.Graph) -> torch.fx.Graph:
    """AOTAutograd's graphs give back lists."""
    output = graph.output_node()
    output.args = ([output.args[0]],)
    return graph


def test_a_chain_writes_what_the_product_reads_and_the_next_one_writes_over_the_product() -> None:
    assert run(lambda a, b, w: ((a.sin() + b).relu() @ w).cos() * 2, 3) == "+ + mm - - +"


def test_what_reads_little_is_computed_again_for_a_later_kernel() -> None:
    def reads_two(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        total = a + b
        return total.sin() @ w + total

    assert run(reads_two, 3) == "+ + mm - - +"


def test_what_reads_much_is_written_for_a_later_kernel() -> None:
    def reads_five(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, w: Tensor) -> Tensor:
        total = a + b + c + d + e
        return total.sin() @ w + total

    assert run(reads_five, 6) == "+ + + mm - - - +"


def test_a_sum_over_rows_is_written_for_a_later_kernel_and_not_for_the_same() -> None:
    assert run(lambda a, w: (a / a.sum(-1, keepdim=True)) @ w, 2) == "+ + mm -"
    assert run(lambda a, w: (a.sin() @ w) * a.sum(-1, keepdim=True), 2).count("+") == 4


def test_results_that_come_from_the_same_buffers_are_written_by_one_kernel() -> None:
    def two(a: Tensor, w: Tensor) -> Tensor:
        product = a @ w
        return product.sin() @ w + product.cos() @ w

    # Neither is written over the product, because both read it.
    assert run(two, 2) == "+ mm + + - + mm - + mm - - - +"


def test_a_result_is_written_over_a_buffer_that_it_alone_reads() -> None:
    def gated(a: Tensor, w: Tensor) -> Tensor:
        """The backward of a gated layer: one product is read by both results, the other by one of them."""
        shared, own = a @ w, a.t() @ w
        return (shared * 2) @ w + (shared * own) @ w

    # Memory for one of the two results: the other is written over `own`.
    assert run(gated, 2) == "+ mm + mm + - + - + mm - + mm - - - +"


def test_what_is_written_by_index_has_memory_of_its_own() -> None:
    def put(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.aten.index_put(a, [torch.full((SIZE,), 0)], b).sin()

    assert run(put, 2).count("+") == 2
