"""What is captured when, and what happens when a guard fails; graphs are stood in for on the CPU."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs_on_cpu import CpuGraph, captured_on_cpu
from torch import Tensor, nn
from whole import strategies

import shardwise
from shardwise import Plan
from shardwise.errors import InvalidModel


@pytest.fixture(autouse=True)
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Looking(nn.Module):
    """Takes a branch by a value, and keeps statistics of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        if mask.all():
            return self.second(x)
        return self.second(x * mask[:, None])


class Run:
    """A training of a model, captured or not."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan | None = None,
        captured: bool = True,
        loss: Callable[..., Tensor] | None = None,
        must: bool = False,
    ) -> None:
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.model = model
        # AdamW reads its own counter where that lies, which here is the device.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        shardwise.prepare(model, self.optimizer, plan or Plan())
        loss_of = loss or (lambda *inputs: self.model(*inputs).square().mean())

        def step(*inputs: Any) -> Tensor:
            loss = loss_of(*inputs)
            loss.backward()
            shardwise.clip_grad_norm_(model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.step: Any = step
        self.lines: list[str] = []
        self.log: list[str] = []
        if captured:
            functions = () if loss is None else (loss,)
            self.step, self.lines, recorder = captured_on_cpu(
                step, model, self.optimizer, functions=functions, must=must
            )
            self.log = recorder.log
        self.replayed: list[bool] = []
        self.losses: list[float] = []

    def take(self, *inputs: Any) -> None:
        self.losses.append(self.step(*inputs).item())
        self.replayed.append(hasattr(self.step, "report") and self.step.report.captured)

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def same_as(self, other: "Run") -> bool:
        ours, theirs = self.state(), other.state()
        return self.losses == other.losses and all(torch.equal(ours[name], theirs[name]) for name in ours)


def batch(step: int, *, padded: bool = False, size: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.ones(size, dtype=torch.bool)
    mask[-1] = not padded
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(step)), mask


def both(make: Callable[[], nn.Module], batches: list[tuple[Any, ...]], **how: Any) -> tuple[Run, Run]:
    found = []
    for captured in (True, False):
        run = Run(make(), captured=captured, **how)
        for each in batches:
            run.take(*each)
        found.append(run)
    return found[0], found[1]


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_a_tenth_of_the_steps_breaks_its_guard_and_all_are_as_without_capture(strategy: str) -> None:
    chosen = random.Random(1)
    batches = [batch(step, padded=step > 5 and chosen.random() < 0.1) for step in range(80)]
    captured, ordinary = both(Looking, batches, plan=Plan(strategy=strategy))
    assert captured.same_as(ordinary)
    assert len(captured.lines) == 1
    assert captured.log.count("record") == 2
    # Each pass is followed by exactly one update or one undoing.
    assert captured.log.count("passes") == captured.log.count("update") + captured.log.count("undo")
    assert sum(captured.replayed) == captured.log.count("update") > 65


def test_the_fourth_step_is_captured_and_replays_1_and_10_are_compared() -> None:
    captured, ordinary = both(Looking, [batch(step) for step in range(20)])
    assert captured.same_as(ordinary)
    assert [number for number, replayed in enumerate(captured.replayed) if not replayed] == [0, 1, 2, 3, 12]
    assert captured.lines == [
        "capture: steps are replayed as CUDA graphs from here on, 1 values that it looks at are guarded"
    ]


def test_other_shapes_get_their_own_graphs_after_two_ordinary_steps() -> None:
    sizes = [4, 4, 4, 4, 4, 6, 6, 6, 6, 4, 6]
    captured, ordinary = both(Looking, [batch(step, size=size) for step, size in enumerate(sizes)])
    assert captured.same_as(ordinary)
    assert captured.replayed == [False] * 4 + [True] + [False] * 2 + [True] * 4


def test_frozen_parameters_and_options_begin_again() -> None:
    found = []
    for captured in (True, False):
        run = Run(Looking(), captured=captured)
        for step in range(24):
            if step == 8:
                run.optimizer.param_groups[0]["weight_decay"] = 0.3
            if step == 14:
                run.model.first.requires_grad_(False)
            run.take(*batch(step))
        found.append(run)
    assert found[0].same_as(found[1])
    assert [found[0].replayed[step] for step in (7, 8, 9, 11, 13, 14, 15, 17, 23)] == [
        True, False, False, True, True, False, False, True, True
    ]  # fmt: skip


def test_values_that_change_too_often_end_capturing() -> None:
    class Many(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            signs = [bool(x[0, column] > 0) for column in range(4)]
            return super().forward(x) * (1 + sum(signs))

    batches = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)),) for step in range(60)]
    captured, ordinary = both(lambda: Many(8, 8), batches)
    assert captured.same_as(ordinary)
    assert "the values that the step looks at changed in" in captured.lines[-1]
    assert len(captured.lines) == 2
    assert not captured.replayed[-1]


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Growing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(1)
        return super().forward(x)


class Replacing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        with torch.inference_mode():
            self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.seen += 1
        return super().forward(x) + self.seen


class Layerdrop(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand([]) < 2 else x


class Shuffling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([1, 1])


class Indexing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: 1 + int(x.argmax()) % 2]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Counting(8, 8), "model.calls changes in Python in each step"),
        (Growing, "model.kept changes in Python in each step"),
        (Replacing, "model.mean changes in Python in each step"),
        (Remembering, "model.seen is an inference tensor, to which torch does not count writes"),
        (lambda: Layerdrop(8, 8), "the step draws random numbers from torch's generator on the CPU (layerdrop?)"),
        (lambda: Shuffling(8, 8), "the step draws random numbers from Python's generator on the CPU (layerdrop?)"),
        (
            lambda: Indexing(8, 8),
            "(return super().forward(x)[: 1 + int(x.argmax()) % 2]) reads a number from the device",
        ),
    ],
)
def test_what_a_replay_would_leave_out_is_not_captured(make: Callable[[], nn.Module], why: str) -> None:
    captured, ordinary = both(make, [(batch(step)[0],) for step in range(8)])
    assert captured.log == []
    assert captured.losses == ordinary.losses
    assert len(captured.lines) == 1
    assert captured.lines[0].startswith("capture: ordinary steps, not captured: ")
    assert why in captured.lines[0]


def test_under_on_that_is_an_error() -> None:
    run = Run(Counting(8, 8), must=True)
    with pytest.raises(
        InvalidModel, match=r"model.calls changes in Python in each step; set capture = 'auto' or 'off'"
    ):
        for step in range(5):
            run.take(batch(step)[0])


def test_a_loss_that_counts_is_not_captured_either() -> None:
    model, calls = nn.Linear(8, 8), 0

    def loss(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return model(x).square().mean()

    run = Run(model, loss=loss)
    for step in range(6):
        run.take(batch(step)[0])
    assert "loss.calls changes in Python in each step" in run.lines[0]


def test_an_attribute_that_is_set_between_steps_is_followed() -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    found = []
    for captured in (True, False):
        run = Run(Scaled(8, 8), captured=captured)
        run.model.factor = 1.0
        for step in range(18):
            if step == 7:
                run.model.factor = 3.0
            run.take(batch(step)[0])
        found.append(run)
    assert found[0].same_as(found[1])
    assert found[0].replayed[6]
    assert not found[0].replayed[7]
    assert found[0].replayed[-1]


def test_gradients_of_before_the_step_make_it_an_ordinary_one() -> None:
    run = Run(Looking())
    for step in range(6):
        run.take(*batch(step))
    run.model(*batch(6)).sum().backward()
    run.take(*batch(7))
    assert not run.replayed[-1]
    run.take(*batch(8))
    assert run.replayed[-1]


def test_a_tape_is_recorded_in_ordinary_steps() -> None:
    run = Run(Looking())
    for step in range(6):
        run.take(*batch(step))
    with shardwise.tape(run.model) as recorded:
        run.take(*batch(7))
        assert recorded.take()
    assert not run.replayed[-1]


def test_a_replay_that_gives_other_gradients_ends_capturing() -> None:
    """A table that only the model's code names: no key sees it, the comparison does."""
    table = {"factor": 1.0}

    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * table["factor"]

    run = Run(Hidden(8, 8))
    for step in range(12):
        run.take(batch(step)[0])
    # What a graph would go on with.
    graph = run.step._store.histories[0].graphs[0].graph
    inner, run.step.step = graph.step, run.step.step

    def stale(*inputs: Any) -> Any:
        table["factor"] = 1.0
        try:
            return inner(*inputs)
        finally:
            table["factor"] = 2.0

    graph.step = stale
    table["factor"] = 2.0
    run.take(batch(12)[0])
    assert "replayed gradients differ from those of the same step" in run.lines[-1]


def test_what_a_graph_cannot_be_given_is_told() -> None:
    class Encoded(dict[str, Tensor]):
        pass

    run = Run(nn.Linear(8, 8), loss=lambda given: run.model(given["x"]).square().mean())
    for step in range(5):
        run.take(Encoded(x=batch(step)[0]))
    assert "the step is given a Encoded, in which no tensors are found" in run.lines[0]


def test_too_little_memory_means_ordinary_steps() -> None:
    run = Run(Looking())
    run.step._device.no_room = "graphs could take 3.0 GiB"
    for step in range(6):
        run.take(*batch(step))
    assert run.lines == ["capture: ordinary steps, not captured: graphs could take 3.0 GiB"]
    assert run.log == []


@pytest.mark.parametrize(("slower", "ends"), [(0.05, False), (0.3, True)])
def test_what_does_not_pay_ends(monkeypatch: pytest.MonkeyPatch, slower: float, ends: bool) -> None:
    run = Run(Looking())
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    inner, update = run.step.step, CpuGraph.replay_update
    run.step._device.settled_seconds = lambda: now
    # A second for a step, which a graph on the CPU runs itself; and what a replay takes besides.
    run.step.step = lambda *inputs: (pass_time(1.0), inner(*inputs))[1]
    monkeypatch.setattr(CpuGraph, "replay_update", lambda graph: (pass_time(slower), update(graph))[1])
    for step in range(12):
        run.take(*batch(step))
    assert run.replayed[-1] is not ends
    assert any("a replay takes 1300.0 ms, an ordinary step 1000.0 ms" in line for line in run.lines) is ends


def test_every_kind_of_step_being_new_ends_it() -> None:
    run = Run(Looking())
    for step in range(201):
        run.take(*batch(step, size=2 + step))
    assert "only 0 of 200 steps could be replayed" in run.lines[0]


def pool_of(run: Run) -> Any:
    return run.step._memory.pool


def test_nothing_is_replayed_over_what_an_ordinary_step_left_behind() -> None:
    """The graphs go, and are captured again around it."""
    found = []
    for captured in (True, False):
        run = Run(Looking(), captured=captured)
        for step in range(14):
            run.take(*batch(step, padded=step == 6))
            if captured and step == 6:
                pool_of(run).in_use = {(0, 512)}
        found.append(run)
    assert found[0].same_as(found[1])
    # Replays 1, and 2 of which is undone; what was left behind is found before step 7.
    assert [number for number, replayed in enumerate(found[0].replayed) if not replayed][:6] == [0, 1, 2, 3, 6, 7]
    assert found[0].replayed[8]
    assert found[0].log.count("record") == 2
    assert len(found[0].lines) == 1


def test_evaluations_that_leave_something_behind_again_get_memory_of_their_own() -> None:
    run = Run(Looking())
    pool = pool_of(run)
    filled = []
    run.model.second.register_forward_pre_hook(lambda *_: filled.append(pool.is_filled))
    for step in range(24):
        run.take(*batch(step))
        if step in (6, 12, 18):
            with torch.no_grad():
                run.model(*batch(step))
            pool.in_use = {(step, step + 1)} if filled[-1] else pool.in_use
    assert run.lines[1:] == [
        "capture: evaluations leave tensors behind that replays would overwrite: they get memory of their own"
    ]
    assert run.log.count("record") == 3
    assert run.replayed[19]
    assert not pool.is_filled


def test_steps_that_leave_something_behind_again_get_memory_of_their_own_which_is_given_back() -> None:
    run = Run(Looking())
    pool = pool_of(run)
    for step in range(30):
        run.take(*batch(step, padded=step in (6, 14, 22)))
        if step in (6, 14):
            pool.in_use = {(step, step + 1)}
    assert "ordinary steps leave tensors behind" in run.lines[1]
    assert run.replayed[23]
    # The step of 22, and one that was compared.
    assert run.step._device.num_releases > 0


def test_where_capturing_ends_steps_stay_in_the_pool_until_other_shapes_come_on_a_full_device() -> None:
    run = Run(Counting(8, 8))
    for step in range(6):
        run.take(batch(step)[0])
    pool, device = pool_of(run), run.step._device
    assert pool.log == ["begin", "end"] * 6
    device.free = 0.05
    run.take(batch(6)[0])
    assert pool.log == ["begin", "end"] * 7
    moment = next(iter(run.optimizer.state.values()))["momentum_buffer"]
    run.take(batch(7, size=6)[0])
    assert pool.log == ["begin", "end"] * 7 + ["renew"]
    moved = next(iter(run.optimizer.state.values()))["momentum_buffer"]
    assert moved is not moment
    assert device.num_releases > 0
