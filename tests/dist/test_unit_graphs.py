"""Units as graphs in loops of all kinds, on simulated graphs: the bits of the same loop without them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import LOOPS, Model, batch, penalised
from ranks import run_ranks
from simulated_graphs import SimulatedGraphs, simulated
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from whole import in_turn

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.engine.graphs import arena
from shardwise.engine.graphs.not_captured import NotCaptured
from shardwise.plan import Plan

STRATEGIES = ("ddp", "zero2", "shard_grad_op", "fsdp")

# Calls that are replayed at least. Without accidents it is 0.24 in the worst loop, "dropped"; but a thread of Gloo may hold
# a gradient until the next pass begins, and then everything is recorded again, without gradients: 0.16 at least.
REPLAYED = 0.1


def run(
    rank: int,
    loop: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model = Model(**model_options).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.prepare(model, optimizer, Plan(**options))
    torch.manual_seed(5 + rank)
    said: list[Any] = []
    {**LOOPS, "penalised": penalised}[loop](model, optimizer, rank=rank, said=said)
    graphs = engine_of(model).graphs
    counts = (graphs.num_calls, graphs.num_replayed) if graphs is not None else (0, 0)
    return said, shardwise.full_state_dict(model)["model"], counts


def difference(one: Any, other: Any) -> str:
    """Describe the first difference between two runs; "" if all bits are equal."""
    said, values, _ = one
    said_by_other, values_of_other, _ = other
    for number, (first, second) in enumerate(zip(said, said_by_other, strict=True)):
        if not torch.equal(first, second):
            return f"value {number} of {len(said)}: {first} and {second}"
    return next((name for name, value in values.items() if not torch.equal(value, values_of_other[name])), "")


def compared(rank: int, loop: str, options: dict[str, Any], model_options: dict[str, Any]) -> tuple[int, int]:
    without = run(rank, loop, options, model_options)
    with simulated():
        graphed = run(rank, loop, options, model_options)
    assert not difference(without, graphed)
    return graphed[2]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("loop", "strategy"), in_turn(sorted(LOOPS), "fsdp", "ddp", every=STRATEGIES))
def test_a_loop_with_unit_graphs_has_the_bits_of_the_same_loop_without(loop: str, strategy: str) -> None:
    for num_calls, num_replayed in run_ranks(compared, num_ranks=2, args=(loop, {"strategy": strategy}, {})):
        assert num_replayed > num_calls * REPLAYED, (num_calls, num_replayed)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_gradients_of_another_use_of_a_parameter_are_added_to_those_of_graphs(strategy: str) -> None:
    options = {"strategy": strategy, "precision": "bf16"} if strategy == "ddp" else {"strategy": strategy}
    for num_calls, num_replayed in run_ranks(compared, num_ranks=2, args=("penalised", options, {})):
        assert num_replayed > num_calls * REPLAYED, (num_calls, num_replayed)


def gradients_in_graph_memory(rank: int, strategy: str) -> list[bool]:
    """Return whether gradients lie in the memory of graphs, step by step."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    found = []
    for step in range(12):
        model(batch(step, rank=rank)).square().mean().backward()
        found.append(engine_of(model).graphs.arenas.all[0].holds_gradients)
        # The last steps begin with the gradients of earlier ones.
        if step < 8:
            optimizer.step()
            optimizer.zero_grad()
    return found


def in_graph_memory(rank: int, strategy: str) -> list[bool]:
    with simulated(moved=0.0):
        return gradients_in_graph_memory(rank, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_lie_in_the_memory_of_graphs_until_they_outlive_a_pass(strategy: str) -> None:
    # One rank: Gloo's threads may hold what was reduced for a moment longer, and so until the next pass begins.
    (found,) = run_ranks(in_graph_memory, num_ranks=1, args=(strategy,))
    # The program is learned; three ordinary steps, an observed one, the recorded one, replays; an accumulation.
    assert found == [False] * 5 + [True] * 4 + [False] * 3


def with_gradients_elsewhere(rank: int) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "places_gradients", lambda activations, **others: False)
        with simulated(moved=0.0):
            assert not any(gradients_in_graph_memory(rank, "fsdp"))
        return compared(rank, "plain", {"strategy": "fsdp"}, {})


def test_gradients_may_lie_elsewhere() -> None:
    for num_calls, num_replayed in run_ranks(with_gradients_elsewhere, num_ranks=2):
        assert num_replayed > num_calls * REPLAYED, (num_calls, num_replayed)


PLANS: dict[str, dict[str, Any]] = {
    "recompute": {"strategy": "fsdp", "recompute": "full"},
    "selective": {"strategy": "zero2", "recompute": "selective"},
    "dynamic": {"strategy": "fsdp", "dynamic": True},
    "tiles": {"strategy": "fsdp", "tile": {"*.out": 2}},
    "bf16": {"strategy": "fsdp", "precision": "bf16"},
    "states on the host": {"strategy": "zero2", "offload_states": True},
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ledger("tiles-in-graphs", outcome="right")] if name == "tiles" else [])
        for name in sorted(PLANS)
    ],
)
def test_it_has_under_other_plans(name: str) -> None:
    for num_calls, num_replayed in run_ranks(
        compared, num_ranks=2, args=("plain", PLANS[name], {"dropout": 0.0 if name in ("selective", "tiles") else 0.1})
    ):
        assert num_replayed > num_calls * REPLAYED, (num_calls, num_replayed)


def compared_in_float64(rank: int, strategy: str) -> float:
    options = {"strategy": strategy, "precision": "native"}
    _, values, _ = run(rank, "plain", options, {"skips": True}, dtype=torch.float64)
    with simulated():
        _, values_with, _ = run(rank, "plain", options, {"skips": True}, dtype=torch.float64)
    return max(float((values[name] - values_with[name]).abs().max()) for name in values)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_unit_whose_input_others_use_too_differs_by_rounding_alone(strategy: str) -> None:
    """Its two gradients of that input are added to each other first, and only then to those of others."""
    assert max(run_ranks(compared_in_float64, num_ranks=2, args=(strategy,))) < 1e-9


class Counting(nn.Linear):
    """Counts its calls in Python."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Reading(nn.Linear):
    """Takes a branch by a value of the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


class Keeping(nn.Linear):
    """Keeps a tensor on itself."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Viewing(nn.Linear):
    """Returns a view of its input next to its result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x[:1]


class Writing(nn.Linear):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class Recurrent(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.cell = nn.GRU(num_inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x)[0]
        return found


UNFIT: dict[str, tuple[type[nn.Module], str]] = {
    "viewing": (Viewing, "it returns a view of an input or of a parameter"),
    "writing": (Writing, "it writes into its inputs"),
}
# What they do in Python is done at each call, or comes before and after a graph.
FIT: dict[str, type[nn.Module]] = {"counting": Counting, "reading": Reading, "keeping": Keeping}


class Mixed(nn.Module):
    """A fit unit, one of another kind, and a fit one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), kind(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.third(x[0] if isinstance(x, tuple) else x)


def trained(model: nn.Module, *, num_steps: int = 16, **options: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan(units="leaf", **options))
    losses = []
    for step in range(num_steps):
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mixed(rank: int, kind: type[nn.Module]) -> tuple[dict[str, str], int, str]:
    expected = trained(Mixed(kind))
    model = Mixed(kind)
    with simulated() as lines:
        assert all(map(torch.equal, trained(model), expected))
    graphs = engine_of(model).graphs
    assert graphs is not None
    return {unit.name: unit.reason() for unit in graphs.units}, graphs.num_replayed, " ".join(lines)


NOTED: list[torch.Size] = []


class Noting(nn.Linear):
    """Has an effect that nothing can see."""

    def forward(self, x: Tensor) -> Tensor:
        NOTED.append(x.shape)
        return super().forward(x)


def noted(rank: int) -> tuple[int, int]:
    model = Mixed(Noting)
    with simulated():
        trained(model, uncaptured=("second",))
    graphs = engine_of(model).graphs
    assert graphs is not None
    return len(NOTED), graphs.num_replayed


def test_an_uncaptured_unit_runs_in_python_at_every_call() -> None:
    ((num_noted, num_replayed),) = run_ranks(noted, num_ranks=1)
    assert num_noted == 16
    assert num_replayed > 0


@pytest.mark.parametrize("name", sorted(UNFIT))
def test_a_unit_that_a_replay_would_change_runs_as_an_ordinary_one_and_says_why(name: str) -> None:
    kind, reason = UNFIT[name]
    ((reasons, num_replayed, told),) = run_ranks(mixed, num_ranks=1, args=(kind,))
    assert reason in reasons["second"]
    assert f"second: {reasons['second']}" in told
    assert reasons["first"] == reasons["third"] == ""
    assert num_replayed >= 4


@pytest.mark.parametrize("name", sorted(FIT))
def test_a_unit_that_does_more_than_its_graph_is_replayed_all_the_same(name: str) -> None:
    ((reasons, num_replayed, told),) = run_ranks(mixed, num_ranks=1, args=(FIT[name],))
    assert set(reasons.values()) == {""}
    assert num_replayed >= 3 * 4
    assert told == "capture: 3 units run as CUDA graphs from here on"


def test_a_recurrent_layer_is_no_graph() -> None:
    ((reasons, num_replayed, _),) = run_ranks(mixed, num_ranks=1, args=(Recurrent,))
    assert set(reasons) == {"first", "third"}
    assert num_replayed >= 4


class Full(SimulatedGraphs):
    def free_share(self) -> float:
        return 0.05


class Growing(SimulatedGraphs):
    def reserved_bytes(self) -> int:
        return 200


class FailingOnce(SimulatedGraphs):
    failed = False

    def record(self, compute: Callable[[], Any]) -> Any:
        if not self.failed:
            self.failed = True
            raise NotCaptured("it measures its kernels")
        return super().record(compute)


def forms_with_graphs(rank: int, lengths: list[int], device: type[SimulatedGraphs] | None = None) -> list[int]:
    """Return after each pass how many forms have graphs. Eight passes of length 6 come before; 0 is an evaluation.

    `device`: what the graphs' device has become by then.
    """
    with simulated(moved=0.0):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan())
        graphs = engine_of(model).graphs
        assert graphs is not None
        found = []
        for number, length in enumerate([6] * 8 + lengths):
            if number == 8 and device is not None:
                graphs.arenas.all[0].device.__class__ = device
            with torch.set_grad_enabled(length > 0):
                model(batch(0, rank=rank, length=length or 5)).sum().backward() if length else model(
                    batch(0, rank=rank)
                )
            optimizer.step()
            optimizer.zero_grad()
            found.append(len(graphs.arenas.all[0].passes))
        assert graphs.num_replayed >= 2 * 4
        return found[8:]


# After which passes, how many forms have graphs.
MEMORY: dict[str, tuple[list[int], list[int], type[SimulatedGraphs] | None]] = {
    "a smaller form is recorded at once": ([4, 4, 5, 4, 6], [1, 2, 2, 3, 3], None),
    "a larger one gets the memory": ([4, 8, 6], [1, 0, 0], None),
    "a form that cannot be recorded at once waits": ([4] * 10, [1, *[0] * 8, 1], FailingOnce),
    "an evaluation on a full device gets it": ([0], [0], Full),
    "an evaluation that grows gets it from then on": ([0, 6, 0, 6], [1, 1, 0, 0], Growing),
}


@pytest.mark.parametrize("name", sorted(MEMORY))
def test_graphs_make_way_where_a_pass_would_need_memory_besides(name: str) -> None:
    lengths, expected, device = MEMORY[name]
    assert run_ranks(forms_with_graphs, num_ranks=1, args=(lengths, device)) == [expected]


def forms_that_hardly_repeat(rank: int) -> tuple[list[int], int]:
    with simulated(at_once=True, moved=0.0):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan())
        graphs = engine_of(model).graphs
        assert graphs is not None
        found = []
        for length in (40, 40, *range(39, 9, -1)):
            model(batch(0, rank=rank, length=length)).sum().backward()
            optimizer.zero_grad()
            found.append(len(graphs.arenas.all[0].passes))
        return found, graphs.num_replayed


def test_graphs_that_do_not_repay_their_recordings_go() -> None:
    (((*_, last), num_replayed),) = run_ranks(forms_that_hardly_repeat, num_ranks=1)
    assert last == num_replayed == 0


class Skipping(nn.Module):
    """Leaves a unit out of most passes; that one and another write their buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (spectral_norm(nn.Linear(4, 4)) for _ in range(3))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # Neither in the pass that is observed nor in most later ones.
        x = self.second(x) if self.number % 5 == 0 else x
        return self.third(x)


def skipping(rank: int) -> tuple[int, int]:
    def losses(model: Skipping) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan(units="class:ParametrizedLinear"))
        found = []
        for number in range(40):
            model.number = number
            loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    expected = losses(Skipping())
    with simulated(moved=0.2):
        model = Skipping()
        assert all(map(torch.equal, losses(model), expected))
    graphs = engine_of(model).graphs
    assert graphs is not None
    return graphs.num_replayed, sum(one.num_computed for one in graphs.arenas.all[0].passes.values())


def test_a_backward_that_computes_a_forward_again_begins_with_the_buffers_that_it_had() -> None:
    ((num_replayed, num_computed),) = run_ranks(skipping, num_ranks=1)
    assert num_replayed > 10
    assert num_computed > 0


def hooked_later(rank: int) -> tuple[int, int, int]:
    """A hook comes while units are replayed: it is called from then on."""
    calls: list[int] = []
    with simulated(moved=0.0):
        model = Mixed(nn.Linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan(units="leaf"))
        graphs = engine_of(model).graphs
        assert graphs is not None
        for step in range(20):
            if step == 10:
                model.second.register_forward_hook(lambda *given: calls.append(1))
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(calls), graphs.num_replayed, graphs.num_calls


def test_a_hook_that_comes_later_is_called() -> None:
    ((num_hooked, num_replayed, num_calls),) = run_ranks(hooked_later, num_ranks=1)
    assert num_hooked == 10
    # A unit's own hooks are no part of its graph.
    assert num_replayed == (20 - 6) * 3
    assert num_calls == 20 * 3
