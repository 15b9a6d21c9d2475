"""Who uses the memory that graphs write into, and when no graph may be replayed; the pool is stood in for."""

import copy
import pickle
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice, CpuPool
from torch import Tensor, nn

from shardwise.engine.captured.shared_evaluation import SharedEvaluation
from shardwise.engine.captured.step_memory import EVALUATIONS, STEPS, StepMemory
from shardwise.engine.graphs.reads import NotCaptured


def memory_of(pool: CpuPool, *, device: CpuDevice | None = None) -> StepMemory:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    return StepMemory(pool, device=device or CpuDevice(), optimizer=optimizer)


def step_in(memory: StepMemory, *, size: int = 2) -> None:
    with memory.of_step((torch.zeros(size),)):
        pass


def record(memory: StepMemory, pool: CpuPool, *, result: Any = None, new: set[tuple[int, int]] | None = None) -> Any:
    before = memory.begin_recording()
    pool.in_use |= new or set()
    return memory.end_recording(before, result=result)


def test_a_step_fills_the_pool_and_leaves_it_when_it_raises() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    with pytest.raises(ValueError, match="of the step"), memory.of_step(()):
        assert pool.is_filled
        raise ValueError("of the step")
    assert not pool.is_filled


def test_what_was_in_use_when_a_graph_was_recorded_may_stay_and_nothing_else() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    pool.in_use = {(0, 100)}
    record(memory, pool)
    step_in(memory)
    assert memory.is_clear()
    # A part of it, after it was freed: no graph writes there either.
    step_in(memory)
    pool.in_use = {(20, 100)}
    assert memory.is_clear()
    step_in(memory)
    pool.in_use = {(20, 120)}
    assert not memory.is_clear()
    pool.in_use = set()
    assert memory.is_clear()


def test_what_a_graph_returned_is_its_own_until_it_is_gone() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    first, second = torch.zeros(4), torch.zeros(4)
    places = [(tensor.data_ptr(), tensor.data_ptr() + 512) for tensor in (first, second)]
    record(memory, pool)
    held = record(memory, pool, result={"loss": first}, new={places[0]})
    record(memory, pool, result=(second,), new={places[1]})
    step_in(memory)
    assert memory.is_clear()
    # The first graph may write where the second one's result was.
    memory.forget(held)
    step_in(memory)
    assert not memory.is_clear()


def test_a_graph_that_holds_more_than_its_result_is_refused() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    with pytest.raises(NotCaptured, match="keeps tensors that it does not return"):
        record(memory, pool, result=torch.zeros(4), new={(0, 1024)})
    # A little is torch's own, until it is gone.
    pool.in_use = set()
    record(memory, pool, result=torch.zeros(4), new={(0, 512)})
    for in_use, is_clear in (({(0, 512)}, True), (set(), True), ({(0, 512)}, False)):
        step_in(memory)
        pool.in_use = in_use
        assert memory.is_clear() is is_clear


def test_who_leaves_something_behind_twice_gets_memory_of_its_own() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    for found in ("", EVALUATIONS):
        record(memory, pool)
        step_in(memory)
        assert memory.enter(EVALUATIONS)
        pool.end()
        assert memory.blame() == found
    # Nobody used it since: what costs the graphs is on another rank.
    assert memory.blame() == ""
    assert memory.is_shared_with(STEPS)
    assert not memory.enter(EVALUATIONS)
    assert not pool.is_filled


def test_large_results_of_evaluations_are_copied_once_they_were_kept_and_others_always() -> None:
    pool = CpuPool()
    memory = memory_of(pool)
    large, small = torch.zeros(2**20), torch.zeros(4)
    result = {"logits": large, "loss": small}

    def copies(user: str) -> list[bool]:
        found = memory.copied_out(result, user=user)
        assert all(torch.equal(found[name], result[name]) for name in result)
        return [found[name] is not result[name] for name in ("logits", "loss")]

    assert copies(STEPS) == [True, True]
    assert copies(EVALUATIONS) == [False, True]
    memory.enter(EVALUATIONS)
    memory.blame()
    assert copies(EVALUATIONS) == [True, True]
    memory.has_replays = False
    assert copies(STEPS) == [False, False]


@pytest.mark.parametrize("has_graph", [True, False])
def test_on_a_full_device_other_shapes_leave_the_pool_unless_graphs_lie_there(has_graph: bool) -> None:
    pool, device = CpuPool(), CpuDevice()
    memory = memory_of(pool, device=device)
    device.free = 0.05
    step_in(memory)
    if has_graph:
        record(memory, pool)
    step_in(memory)
    assert pool.log == ["begin", "end"] * 2
    step_in(memory, size=3)
    step_in(memory)
    assert pool.log == ["begin", "end"] * (4 if has_graph else 2) + ([] if has_graph else ["renew"])
    assert device.num_releases == 1


class Looking(nn.Linear):
    """Notes whether its forward fills the pool."""

    def __init__(self, pool: CpuPool) -> None:
        super().__init__(4, 4)
        self.pool = [pool]
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.pool[0].is_filled)
        if x.dim() == 3:
            return self(x[0])
        self.made: Tensor = super().forward(x)
        return self.made


def evaluated(pool: CpuPool) -> tuple[Looking, SharedEvaluation]:
    model = Looking(pool)
    device: Any = CpuDevice()
    return model, SharedEvaluation(model, memory=memory_of(pool), device=device)


def test_an_evaluation_lies_in_the_pool() -> None:
    pool = CpuPool()
    model, shared = evaluated(pool)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(1, 2, 4))
    model(torch.ones(2, 4))
    assert model.seen == [True, True, True, False]
    assert not pool.is_filled
    del shared
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert model.seen[-1] is False


def test_a_forward_without_gradients_in_a_step_is_part_of_the_step_also_while_it_is_recorded() -> None:
    pool = CpuPool()
    model, shared = evaluated(pool)
    shared._memory.is_recording = True
    with torch.no_grad():
        assert model(torch.ones(2, 4)) is model.made
    assert pool.log == []
    shared._memory.is_recording = False
    pool.begin()
    with torch.no_grad():
        assert model(torch.ones(2, 4)) is model.made
    assert pool.is_filled


def test_an_evaluation_that_raises_leaves_the_pool() -> None:
    pool = CpuPool()
    model, shared = evaluated(pool)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not pool.is_filled
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert pool.log == ["begin", "end"] * 2
    assert shared is not None


def test_copies_of_a_model_have_hooks_that_do_nothing() -> None:
    pool = CpuPool()
    model, _shared = evaluated(pool)
    model.pool = []
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.pool = [pool]
        with torch.no_grad():
            copied(torch.ones(2, 4))
        assert copied.seen == [False]
