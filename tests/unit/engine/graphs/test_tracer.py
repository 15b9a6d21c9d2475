"""What the tracer traces, what it declines, and what it leaves alone."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.graphs import tracer as tracer_module
from shardwise.engine.graphs.traced_graph import TracedGraph, running
from shardwise.engine.graphs.tracer import Tracer


@pytest.fixture(autouse=True)
def _forget_traces() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.count = 0

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        for number, other in enumerate(others.values()):
            x = x + number * other
        return self.inner(x)


class Counting(Block):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def called(tracer: Tracer, forward: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, list[TracedGraph]]:
    """Call a forward as a unit does; return its result, and the graphs that it has run."""
    ran: list[TracedGraph] = []

    def run(graph: TracedGraph, given: tuple[Any, ...]) -> Any:
        ran.append(graph)
        return graph.function(*given)

    with running(run):
        return tracer.function(forward, names=tuple(options))(forward, *inputs, **options), ran


def test_blocks_of_a_class_share_a_trace_and_lengths_share_another() -> None:
    tracer, blocks = Tracer(), [Block() for _ in range(5)]
    graphs = set()
    for rows in (2, 3, 5, 7):
        for block in blocks:
            result, ran = called(tracer, block.forward, x := torch.ones(rows, 4))
            assert torch.equal(result, block(x))
            graphs.update(ran)
    assert len(graphs) == 2
    assert tracer.seconds > 0


def test_the_order_of_keywords_has_a_trace_of_its_own() -> None:
    tracer, block = Tracer(), Block()
    x, one, two = torch.ones(2, 4), torch.ones(4), torch.full((4,), 2.0)
    _, first = called(tracer, block.forward, x, one=one, two=two)
    turned, second = called(tracer, block.forward, x, two=two, one=one)
    assert torch.equal(turned, block(x, two=two, one=one))
    assert first != second


def test_more_traces_than_torch_allows_by_default_leave_its_limit_to_the_user() -> None:
    tracer, block = Tracer(), Block()
    limit = torch._dynamo.config.recompile_limit
    for number in range(limit + 4):
        block.kind = f"kind {number}"
        block.forward = Kind.forward.__get__(block)  # type: ignore[method-assign]
        _, ran = called(tracer, block.forward, torch.ones(2, 4))
        assert ran
        assert torch._dynamo.config.recompile_limit == limit
    compiled = torch.compile(block.forward, backend="eager", fullgraph=True)
    block.kind = "again"
    assert torch.equal(compiled(torch.ones(2, 4)), block.inner(torch.ones(2, 4)))


class Kind(Block):
    kind = ""

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.inner(x) if self.kind else x


def test_a_generator_of_its_own_is_not_traced() -> None:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draws = random.Random(3)

        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return self.inner(x) * self.draws.random()

    tracer, block, expected = Tracer(), Own(), random.Random(3)
    for _ in range(3):
        result, _ = called(tracer, block.forward, x := torch.ones(2, 4))
        assert torch.allclose(result, block.inner(x) * expected.random())
    assert "is a generator of random numbers of its own" in tracer.why_not


def test_a_traced_module_can_go() -> None:
    """Guards of torch 2.11 keep a module in which they find an attribute missing."""

    class Asking(Block):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return self.inner(x) * getattr(self.inner, "gain", 2)

    block = Asking()
    _, ran = called(Tracer(), block.forward, torch.ones(2, 4))
    gone = weakref.ref(block.inner)
    del block
    gc.collect()
    assert ran
    assert gone() is None


def test_an_interrupt_in_a_trace_ends_the_call_and_the_next_one_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, block = Tracer(), Block()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracer_module, "TracedGraph", interrupted)
        with pytest.raises(KeyboardInterrupt):
            called(tracer, block.forward, torch.ones(2, 4))
    result, ran = called(tracer, block.forward, torch.ones(2, 4))
    assert torch.equal(result, block(torch.ones(2, 4)))
    assert len(ran) == 1


def test_a_failing_trace_runs_in_python_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, block = Tracer(), Counting()

    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("not this one")

    monkeypatch.setattr(tracer_module, "TracedGraph", failing)
    result, ran = called(tracer, block.forward, torch.ones(2, 4))
    assert torch.equal(result, block.inner(torch.ones(2, 4)))
    assert (ran, block.count) == ([], 1)
    assert "not this one" in tracer.why_not


def test_nothing_is_traced_once_the_time_is_spent() -> None:
    tracer, block = Tracer(), Block()
    assert called(tracer, block.forward, torch.ones(2, 4))[1]
    tracer.seconds = 1e9
    assert called(tracer, block.forward, torch.ones(2, 4))[1]
    result, ran = called(tracer, block.forward, x := torch.ones(3, 4))
    assert torch.equal(result, block(x))
    assert not ran


def test_a_counter_is_counted_outside_of_its_graph() -> None:
    tracer, block = Tracer(), Counting()
    graphs: list[TracedGraph] = []
    for _ in range(4):
        graphs += called(tracer, block.forward, torch.ones(2, 4))[1]
    assert block.count == 4
    # The first call had it as a constant.
    (graph,) = set(graphs[1:])
    assert graph.numbers is not None
    assert len(graph.free) == 1


class Looking(Block):
    """Multiplies by what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[str, float] = {}

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        try:
            x = x * self.factors["factor"]
        except KeyError:
            x = x + 1
        return super().forward(x)


class CountingForAll(Block):
    calls = 0

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "why"), [(Looking, "it looks up a key"), (CountingForAll, "it writes an attribute of a class")]
)
def test_code_that_would_be_traced_wrongly_runs_in_python_and_what_it_calls_is_traced(
    kind: type[Block], why: str
) -> None:
    CountingForAll.calls = 0
    block, tracer, x = kind(), Tracer(), torch.ones(2, 4)
    result, ran = called(tracer, block.forward, x)
    CountingForAll.calls = 0
    assert torch.equal(result, block(x))
    assert ran
    assert tracer.why_not.startswith(why)


def test_the_users_own_compiled_functions_look_up_and_write_as_before() -> None:
    called(Tracer(), Looking().forward, torch.ones(2, 4))
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(module)
        return module.forward

    for block in (Looking(), CountingForAll()):
        before = len(graphs)
        torch.compile(block, backend=backend, fullgraph=True)(torch.ones(2, 4))
        assert len(graphs) == before + 1
