"""Steps of a job of one rank in this process: what the core issues, recorded on the tape."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Plan
from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.comm.job.absent import absent_group
from shardwise.engine.core.unit import Unit
from shardwise.engine.engine import engine_of, tape
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program import Kind, build, build_first_step
from shardwise.program.spec import ROOT, UNANNOUNCED

each_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES))
sharded = pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])


@pytest.fixture(autouse=True)
def _job_of_one_rank() -> Iterator[None]:
    # Nobody is absent from a job of one, and torch's fake groups are made at once.
    with absent_group(1):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Calls its blocks in the order that `calls` has at the moment."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 1)
        self.calls = list(range(num_blocks))
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.calls:
            x = self.call(self.blocks[index], x)
        return self.head(x).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


class Training:
    """A prepared model in an ordinary loop; `issued` hands out what was issued since the last time."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.plan = Plan(**settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _, self.optimizer = shardwise.prepare(model, optimizer, self.plan)
        self.engine = engine_of(model)
        self.core = self.engine.core
        self.engine.core.setting.tape.recording = True

    def step(self, number: int = 0) -> float:
        loss = self.model(batch(number))
        loss.backward()
        self.update()
        return float(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def issued(self) -> list[str]:
        return [str(entry) for entry in self.engine.core.setting.tape.take()]

    def program(self, *, reduces: bool = True) -> list[str]:
        """What the program that was learned says."""
        return [
            str(one)
            for one in build(self.core.followed.spec, plan=self.plan, mesh=Mesh(), reduces=reduces).operations()
        ]

    def unit(self, name: str) -> Unit:
        return self.core.units[name]

    def whole(self) -> set[str]:
        return {unit.name for unit in self.core.units.values() if unit.sharded and unit.whole}

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_equal(weights: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert weights.keys() == other.keys()
    for name, value in weights.items():
        assert torch.equal(value, other[name]), name


def plain(model: nn.Module, body: Callable[[nn.Module, torch.optim.Optimizer], None]) -> dict[str, Tensor]:
    """The weights that the same loop gives without a plan."""
    body(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return dict(model.state_dict())


def ordinary_steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 3) -> None:
    for step in range(num_steps):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


# The program of a step


@each_strategy
def test_from_the_second_step_on_the_tape_is_the_program(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    training.step(0)
    training.issued()
    for step in (1, 2):
        training.step(step)
        assert training.issued() == training.program()


class OnlyHead(Net):
    """The root's own gradients are ready first, before backward comes to the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@each_strategy
def test_a_root_that_is_ready_first_is_reduced_in_its_turn_all_the_same(strategy: str) -> None:
    torch.manual_seed(0)
    model = OnlyHead()
    del model.stem
    training = Training(model, strategy=strategy, bucket_bytes=1)
    training.step(0)
    training.issued()
    training.step(1)
    issued, program = (
        [entry for entry in entries if not entry.startswith(("take grads", "backward"))]
        for entries in (training.issued(), training.program())
    )
    assert issued == program


@each_strategy
def test_steps_train_as_without_a_plan(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    for step in range(3):
        training.step(step)
    assert_equal(training.weights(), plain(net(), ordinary_steps))


def test_the_first_step_learns_the_order_in_which_units_are_called() -> None:
    model = net()
    model.calls = [2, 0, 2]
    training = Training(model)
    assert not training.core.followed.learned
    assert training.core.followed.spec.call_order == (ROOT, "blocks.0", "blocks.1", "blocks.2")
    training.step()
    assert training.core.followed.learned
    # What was not called has its place all the same: other ranks might call it.
    assert training.core.followed.spec.call_order == (ROOT, "blocks.2", "blocks.0", "blocks.1", "blocks.2")


@sharded
def test_the_first_step_gathers_on_demand_and_goes_back_by_the_program(strategy: str) -> None:
    training = Training(net(), strategy=strategy, prefetch=1)
    training.step()
    expected = build_first_step(training.core.followed.spec, plan=training.plan, mesh=Mesh())
    assert training.issued() == list(map(str, expected.operations()))


@sharded
def test_between_steps_nothing_is_gathered(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    for step in range(2):
        training.step(step)
        assert not training.whole()


def test_in_a_step_without_a_backward_what_was_gathered_is_used_by_the_next() -> None:
    training = Training(net(), strategy="fsdp")
    training.step(0)
    training.model(batch(1))
    assert training.whole()
    training.issued()
    training.step(2)
    operations = training.issued()
    assert operations[-1] == "update (root)"
    assert not training.whole()


# Forwards that are no part of a step


@each_strategy
def test_a_forward_without_gradients_frees_what_it_gathered_and_changes_nothing(strategy: str) -> None:
    training = Training(net(), strategy=strategy)

    def evaluate() -> None:
        with torch.no_grad():
            training.model(batch(9))

    evaluate()
    for step in range(3):
        training.step(step)
        training.issued()
        evaluate()
        kinds = [entry.kind for entry in training.engine.core.setting.tape.take()]
        assert not training.whole()
        assert kinds.count(Kind.GATHER) == kinds.count(Kind.FREE) == (4 if training.unit(ROOT).sharded else 0)
        assert Kind.FORWARD not in kinds
    training.step(3)
    expected = plain(net(), lambda model, optimizer: ordinary_steps(model, optimizer, num_steps=4))
    assert_equal(training.weights(), expected)


@sharded
def test_a_forward_without_gradients_between_forward_and_backward_changes_nothing(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    for step in range(3):
        loss = training.model(batch(step))
        with torch.no_grad():
            training.model(batch(9))
        loss.backward()
        training.update()
    assert_equal(training.weights(), plain(net(), ordinary_steps))


@each_strategy
def test_two_forwards_may_share_a_backward(strategy: str) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            (model(batch(step)) + model(batch(step + 10))).backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))
    # And the step after it is an ordinary one.
    training.issued()
    training.step()
    assert training.issued() == training.program()


@each_strategy
def test_a_graph_may_be_gone_back_through_twice(strategy: str) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            loss = model(batch(step))
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))


# Recomputation


@each_strategy
def test_a_recomputed_forward_is_no_part_of_the_tape(strategy: str) -> None:
    training = Training(net(), strategy=strategy, recompute="full")
    for step in range(3):
        training.issued()
        training.step(step)
    assert training.issued() == training.program()
    assert_equal(training.weights(), plain(net(), ordinary_steps))


@each_strategy
def test_a_users_own_checkpoint_trains_the_same(strategy: str) -> None:
    model = net()
    model.call = lambda block, x: checkpoint(block, x, use_reentrant=False)
    training = Training(model, strategy=strategy)
    for step in range(3):
        training.issued()
        training.step(step)
    assert training.issued() == training.program()
    assert_equal(training.weights(), plain(net(), ordinary_steps))


def test_a_reentrant_checkpoint_is_refused_by_the_name_of_the_unit() -> None:
    model = net()
    model.call = lambda block, x: checkpoint(block, x.requires_grad_(), use_reentrant=True)
    training = Training(model)
    with pytest.raises(
        InvalidModel, match=r"blocks\.2 is recomputed by a reentrant checkpoint: say use_reentrant=False"
    ):
        training.step()


# Off the program


def test_a_call_more_than_in_the_first_step_is_served_and_recorded() -> None:
    training = Training(net(), strategy="fsdp", prefetch=0)
    training.step(0)
    training.issued()
    training.model.calls = [0, 0, 1, 2]
    training.step(1)
    operations = training.issued()
    forward = operations[: operations.index("backward (root)")]
    # The second call gathers again, without a place in the program.
    assert forward[2:8] == [
        "gather blocks.0",
        "forward blocks.0",
        "free blocks.0",
        "gather blocks.0",
        "forward blocks.0",
        "gather blocks.1",
    ]
    assert operations.count("backward blocks.0") == 2
    assert not training.whole()
    # What is on the program stays on it.
    training.model.calls = [0, 1, 2]
    training.step(2)
    assert training.issued() == training.program()


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("calls", [[0, 0, 1, 2], [2, 1, 0], [0, 2], [], [0, 1, 2, 0]], ids=str)
def test_calls_in_another_order_than_the_first_steps_train_the_same(strategy: str, calls: list[int]) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            model.calls = [0, 1, 2] if step != 1 else calls
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))
    assert not training.whole()


@each_strategy
def test_a_skipped_unit_is_gathered_and_reduced_all_the_same(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    training.step(0)
    training.issued()
    training.model.calls = [0, 2]
    training.step(1)
    issued = training.issued()
    collectives = ("gather", "reduce")
    assert [entry for entry in issued if entry.startswith(collectives)] == [
        entry for entry in training.program() if entry.startswith(collectives)
    ]
    assert "forward blocks.1" not in issued
    # No rank used it, so the optimizer leaves it alone.
    assert not any(flat.master.has_grads for flat in training.unit("blocks.1").flats)


@each_strategy
def test_a_dynamic_plan_learns_every_step(strategy: str) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step, calls in enumerate(([0, 1, 2], [2, 0], [1, 1])):
            model.calls = calls
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy, dynamic=True)
    body(training.model, training.optimizer)
    called = [name for name in training.core.followed.spec.call_order if name == "blocks.1"]
    assert len(called) == 2
    assert_equal(training.weights(), plain(net(), body))


# Frozen parameters, outputs without tensors


@each_strategy
def test_what_is_frozen_or_thawed_is_learned_before_the_next_step(strategy: str) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step, trained in enumerate((True, False, False, True, True)):
            model.blocks[0].requires_grad_(trained)
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))
    training.issued()
    training.step()
    assert training.issued() == training.program()


class Wrapped:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(Block):
    def forward(self, x: Any) -> Any:
        return Wrapped(super().forward(getattr(x, "value", x)))


class WrappingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.value).square().mean()


def test_a_unit_whose_tensors_cannot_be_found_stays_gathered_until_backward_ends_and_says_so_once() -> None:
    torch.manual_seed(0)
    training = Training(WrappingNet(), strategy="fsdp")
    with pytest.warns(UserWarning, match=r"blocks\.\d returns an object in which no tensor can be found") as warned:
        training.step(0)
    assert len(warned) == 2
    training.issued()
    with warnings.catch_warnings(action="error"):
        training.step(1)
    operations = training.issued()
    assert operations == training.program()
    assert training.core.followed.spec.unit("blocks.0").backward == UNANNOUNCED
    assert operations.index("free blocks.0") > operations.index("backward (root)")


# Accumulation


@each_strategy
def test_a_pass_that_keeps_its_gradients_issues_the_program_that_reduces_nothing(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    training.step(0)
    training.issued()
    with shardwise.accumulate(training.model):
        training.model(batch(1)).backward()
    kept = training.issued()
    training.model(batch(2)).backward()
    reduced = training.issued()
    training.update()
    keeping, reducing = training.program(reduces=False), training.program()
    assert kept == keeping[: keeping.index("update (root)")]
    # What was gathered after the last update was waited for in the first pass.
    waits = [entry for entry in kept if entry.startswith("wait gather")] if not training.unit(ROOT).sharded else []
    assert reduced == [entry for entry in reducing[: reducing.index("update (root)")] if entry not in waits]
    assert training.issued() == reducing[reducing.index("update (root)") :]


@each_strategy
@pytest.mark.parametrize("reduced", [False, True])
def test_accumulated_passes_train_as_without_a_plan(strategy: str, reduced: bool) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            for index in range(3):
                if model is training.model:
                    with shardwise.accumulate(model, enabled=index < 2):
                        model(batch(10 * step + index)).backward()
                else:
                    model(batch(10 * step + index)).backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(net(), strategy=strategy, accumulate_reduced=reduced)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))


def test_a_step_in_the_middle_of_an_accumulation_is_refused() -> None:
    training = Training(net())
    with shardwise.accumulate(training.model):
        training.model(batch(0)).backward()
    with pytest.raises(InvalidModel, match=r"run its last backward outside shardwise\.accumulate"):
        training.optimizer.step()


# A backward that raises


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError


def fail(training: Training) -> None:
    """A backward that raises between the blocks 1 and 0."""
    model = training.model
    model.call = lambda block, x: Failing.apply(block(x)) if block is model.blocks[0] else block(x)
    with pytest.raises(ZeroDivisionError):
        model(batch(9)).backward()
    model.call = lambda block, x: block(x)


@each_strategy
@pytest.mark.parametrize("when", [0, 1], ids=["the first step", "a later step"])
def test_a_step_after_a_backward_that_raised_is_a_clean_one(strategy: str, when: int) -> None:
    training = Training(net(), strategy=strategy)
    for step in range(3):
        if step == when:
            fail(training)
        training.issued()
        training.step(step)
    assert training.issued() == training.program()
    assert_equal(training.weights(), plain(net(), ordinary_steps))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "fsdp"])
def test_a_backward_that_raised_after_it_added_to_sharded_gradients_asks_for_the_step_to_begin_again(
    strategy: str, set_to_none: bool
) -> None:
    """Slices are added in place, while backward goes on: what was there before cannot be had back."""
    training = Training(net(), strategy=strategy, accumulate_reduced=True)
    training.step(0)
    with shardwise.accumulate(training.model):
        training.model(batch(8)).backward()
        fail(training)
    with pytest.raises(InvalidData, match=r"optimizer\.zero_grad\(\) and begin the step again"):
        training.model(batch(1))
    training.optimizer.zero_grad(set_to_none=set_to_none)
    for step in (1, 2):
        training.step(step)
    assert_equal(training.weights(), plain(net(), ordinary_steps))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_whole_gradients_are_those_of_before_a_backward_that_raised(strategy: str) -> None:
    """They are added when backward is over."""

    def body(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            model(batch(step)).backward()
            if model is training.model and step == 0:
                fail(training)
        optimizer.step()

    training = Training(net(), strategy=strategy)
    body(training.model, training.optimizer)
    assert_equal(training.weights(), plain(net(), body))


@each_strategy
def test_a_forward_that_raised_is_followed_by_a_clean_step(strategy: str) -> None:
    training = Training(net(), strategy=strategy)
    training.step(0)

    def fail_forward(block: nn.Module, x: Tensor) -> Tensor:
        if block is training.model.blocks[1]:
            raise ZeroDivisionError
        return block(x)

    training.model.call = fail_forward
    with pytest.raises(ZeroDivisionError):
        training.model(batch(9))
    training.model.call = lambda block, x: block(x)
    for step in (1, 2):
        training.step(step)
    assert_equal(training.weights(), plain(net(), ordinary_steps))


def test_a_backward_that_raised_in_an_accumulation_asks_for_the_step_to_begin_again() -> None:
    training = Training(net())
    training.step(0)
    with shardwise.accumulate(training.model):
        training.model(batch(1)).backward()
        fail(training)
    with pytest.raises(InvalidData, match="begin the step again"):
        training.model(batch(2))
    training.optimizer.zero_grad()
    for step in (1, 2):
        training.step(step)
    assert_equal(training.weights(), plain(net(), ordinary_steps))


# What is refused, and the tape itself


def test_a_gradient_of_a_gradient_is_refused() -> None:
    training = Training(net())
    with warnings.catch_warnings(action="ignore"), pytest.raises(InvalidModel, match="gradients of gradients"):
        training.model(batch(0)).backward(create_graph=True)


def test_a_tape_that_does_not_record_has_nothing() -> None:
    training = Training(net())
    training.engine.core.setting.tape.recording = False
    training.step()
    assert not training.issued()
    with tape(training.model) as recorded:
        training.step()
    assert [str(entry) for entry in recorded.take()] == training.program()
    training.step()
    assert not recorded.take()
