"""What a model's hooks tell a listener, on tiny real modules."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.base.errors import InvalidModel
from shardwise.engine.hooks.step_hooks import StepHooks
from shardwise.program.spec import ANNOUNCED, NONE, ROOT, UNANNOUNCED


class Notes:
    """A listener that notes down what it hears; the calls of a unit are counted from each forward of the root."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.backward: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.also: Callable[[str], None] = lambda event: None
        self.ignored: set[str] = set()
        self.in_backward = False

    def awaits(self, unit: str) -> bool:
        return unit not in self.ignored

    def note(self, event: str) -> None:
        self.events.append(event)
        self.also(event)

    def before_forward(self, unit: str) -> int:
        if unit == ROOT:
            self.calls.clear()
        call = self.calls[unit] = self.calls.get(unit, -1) + 1
        self.note(f"forward {unit} {call}")
        return call

    def after_forward(self, unit: str, *, backward: str) -> None:
        self.backward[unit] = backward
        self.note(f"end {unit}")

    def begin_backward(self) -> None:
        self.note("begin backward")
        self.in_backward = True

    def before_backward(self, unit: str, call: int) -> None:
        self.note(f"backward {unit} {call}")

    def grads_ready(self, unit: str) -> None:
        self.note(f"ready {unit}")

    def end_backward(self) -> None:
        self.note("end backward")
        self.in_backward = False

    def recompute(self, unit: str) -> None:
        self.note(f"recompute {unit}")

    def without_gradients(self, unit: str, *, begins: bool) -> None:
        self.note(f"{'begin' if begins else 'end'} {unit} without gradients")

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


def modules_of(model: nn.Module, *units: str) -> dict[str, nn.Module]:
    return {ROOT: model, **{name: model.get_submodule(name) for name in units}}


def expect(hooks: StepHooks[str]) -> None:
    """As the engine does before each forward: each unit expects the gradients of what no unit inside it holds."""
    for unit, module in hooks.modules.items():
        inside = [f"{other}." if unit == ROOT else other.removeprefix(unit + ".") + "." for other in hooks.modules]
        own = [
            parameter
            for name, parameter in module.named_parameters()
            if not any(name.startswith(prefix) for prefix in inside)
        ]
        hooks.grads[unit].expect(own)


def listen(model: nn.Module, *units: str) -> tuple[Notes, StepHooks[str]]:
    notes = Notes()
    hooks = StepHooks(modules_of(model, *units), listener=notes)
    hooks.attach()
    expect(hooks)
    return notes, hooks


class Stack(nn.Module):
    """Children one after the other, each given what the last one gave."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any) -> Any:
        for child in self.children():
            x = child(x)
        return x


class Giving(nn.Module):
    """Gives its linear layer's output in the form that `form` puts it in."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.form = [form]

    def forward(self, x: Tensor) -> Any:
        return self.form[0](self.linear(x))


def run(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


# The order of triggers


def test_backward_is_not_announced_by_a_unit_that_nobody_awaits() -> None:
    model = Stack(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    notes, _ = listen(model, "a", "b")
    notes.ignored = {"a"}
    run(model)
    backward = [event for event in notes.take() if event.startswith("backward")]
    assert backward == ["backward (root) 0", "backward b 0"]


def test_nested_units_are_heard_from_outside_in_and_ready_from_inside_out() -> None:
    model = Stack(a=Stack(x=nn.Linear(2, 2), y=nn.Linear(2, 2)), b=nn.Linear(2, 2))
    notes, _ = listen(model, "a", "a.x", "b")
    run(model)
    assert notes.take() == [
        "forward (root) 0",
        "forward a 0",
        "forward a.x 0",
        "end a.x",
        "end a",
        "forward b 0",
        "end b",
        "end (root)",
        "begin backward",
        # The root hands on b's output, so one gradient announces both.
        "backward (root) 0",
        "backward b 0",
        "ready b",
        "backward a 0",
        # The parameters of a are those of y.
        "ready a",
        "backward a.x 0",
        "ready a.x",
        "end backward",
    ]
    assert set(notes.backward.values()) == {ANNOUNCED}


def test_a_unit_called_twice_has_the_calls_0_and_1() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.relu(self.a(x)))

    model = Twice(a=nn.Linear(2, 2))
    notes, _ = listen(model, "a")
    run(model)
    assert [event for event in notes.take() if " a" in event] == [
        "forward a 0",
        "end a",
        "forward a 1",
        "end a",
        "backward a 1",
        "backward a 0",
        "ready a",
    ]


def test_of_units_that_hand_on_the_same_tensor_backward_comes_to_the_outermost_first() -> None:
    model = Stack(a=Stack(x=Stack(y=nn.Linear(2, 2))))
    notes, _ = listen(model, "a", "a.x", "a.x.y")
    run(model)
    assert [event for event in notes.take() if event.startswith("backward")] == [
        "backward (root) 0",
        "backward a 0",
        "backward a.x 0",
        "backward a.x.y 0",
    ]


def test_a_tensor_that_the_next_unit_writes_into_announces_both_units() -> None:
    model = Stack(a=nn.Linear(2, 2), b=nn.ReLU(inplace=True))
    notes, _ = listen(model, "a", "b")
    run(model)
    assert [event for event in notes.take() if "backward" in event or "ready" in event] == [
        "begin backward",
        "backward (root) 0",
        "backward b 0",
        "backward a 0",
        "ready a",
        "end backward",
    ]


def test_two_outputs_of_a_call_are_one_backward_and_another_need_of_the_unit() -> None:
    class Split(Stack):
        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x)
            return left.sum() + (2 * right).sum()

    model = Split(a=Giving(lambda h: (h + 1, h + 2)))
    notes, _ = listen(model, "a")
    run(model)
    assert notes.take()[-6:] == [
        "begin backward",
        "backward (root) 0",
        "backward a 0",
        "recompute a",
        "ready a",
        "end backward",
    ]


def test_two_forwards_before_one_backward_come_to_each_call_again() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, _ = listen(model, "a")
    first, second = (model(torch.ones(1, 2)) for _ in range(2))
    notes.take()
    (first.sum() + second.sum()).backward()
    assert notes.take() == [
        "begin backward",
        "backward (root) 0",
        "backward a 0",
        "recompute a",
        "ready a",
        "end backward",
    ]


def test_every_backward_begins_and_ends_once() -> None:
    model = Stack(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    notes, _ = listen(model, "a", "b")
    for _ in range(2):
        run(model)
        assert not notes.in_backward
    events = notes.take()
    assert events[: len(events) // 2] == events[len(events) // 2 :]
    assert events.count("begin backward") == events.count("end backward") == 2


def test_a_second_backward_of_a_forward_is_heard_as_the_first() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, _ = listen(model, "a")
    loss = model(torch.ones(1, 2)).sum()
    notes.take()
    loss.backward(retain_graph=True)
    first = notes.take()
    loss.backward()
    assert notes.take() == first


# How backward comes to a unit


@dataclass
class Output:
    hidden: Any
    count: int = 3


class Pair(NamedTuple):
    first: Tensor
    second: str


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def backward_of(form: Callable[[Tensor], Any]) -> str:
    """How backward comes to a unit that gives its output in this form."""
    model = Giving(form)
    notes, _ = listen(model)
    output = model(torch.ones(1, 2))
    assert notes.take() == ["forward (root) 0", "end (root)"]
    if notes.backward[ROOT] == ANNOUNCED:
        # And it does come.
        tensors = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        tensors[0].sum().backward()
        assert "backward (root) 0" in notes.take()
    return notes.backward[ROOT]


def tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (tensor for value in output.values() for tensor in tensors_in(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in tensors_in(value))
    elif isinstance(output, Output):
        yield from tensors_in(output.hidden)


@pytest.mark.parametrize(
    "form",
    [
        lambda h: h,
        lambda h: (1, h, "text"),
        lambda h: [None, [h]],
        lambda h: {"hidden": h, "size": h.shape},
        lambda h: Pair(h, "second"),
        lambda h: Output(h),
        lambda h: Output(Output((h, 1))),
        lambda h: {"all": [Output({"hidden": h})]},
        lambda h: (h, torch.float32, torch.device("cpu"), 1.5, True, b"bytes"),
    ],
    ids=["tensor", "tuple", "list", "dict", "named tuple", "dataclass", "nested dataclass", "mixed", "plain values"],
)
def test_an_output_that_can_be_found_announces_backward(form: Callable[[Tensor], Any]) -> None:
    assert backward_of(form) == ANNOUNCED


@pytest.mark.parametrize(
    "form",
    [Opaque, lambda h: (h, Opaque(h)), lambda h: Output(Opaque(h)), lambda h: lambda: h],
    ids=["object", "object beside a tensor", "object in a dataclass", "closure"],
)
def test_an_object_in_which_no_tensor_can_be_found_leaves_backward_unannounced(form: Callable[[Tensor], Any]) -> None:
    assert backward_of(form) == UNANNOUNCED


@pytest.mark.parametrize(
    "form",
    [lambda h: h.detach(), lambda h: None, lambda h: (h.detach(), 3), lambda h: h.argmax()],
    ids=["detached", "nothing", "a tuple without gradients", "integers"],
)
def test_where_no_output_has_a_gradient_backward_does_not_come(form: Callable[[Tensor], Any]) -> None:
    assert backward_of(form) == NONE


def test_a_unit_without_trained_parameters_may_give_what_it_likes() -> None:
    model = Giving(Opaque).requires_grad_(False)
    notes, _ = listen(model)
    model(torch.ones(1, 2))
    assert notes.backward == {ROOT: NONE}


class WithAuxiliaryLoss(nn.Module):
    """Keeps a loss on itself, in the form that `form` puts it in."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.form = [form]
        self.auxiliary: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.form[0](self.linear(x).square().mean())
        return x


@pytest.mark.parametrize(
    "form",
    [lambda loss: loss, lambda loss: [loss], lambda loss: {"router": (loss, 3)}],
    ids=["tensor", "list", "dict"],
)
def test_a_loss_that_is_kept_on_the_module_announces_backward(form: Callable[[Tensor], Any]) -> None:
    model = Stack(a=WithAuxiliaryLoss(form))
    notes, _ = listen(model, "a")
    model(torch.ones(1, 2))
    assert notes.backward == {"a": ANNOUNCED, ROOT: NONE}
    notes.take()
    (loss,) = tensors_in(model.a.auxiliary)
    loss.backward()
    assert notes.take() == ["begin backward", "backward a 0", "ready a", "end backward"]


def test_a_loss_that_is_kept_deep_inside_a_unit_announces_it_and_one_of_an_inner_unit_does_not() -> None:
    model = Stack(a=Stack(deep=WithAuxiliaryLoss()))
    notes, _ = listen(model, "a")
    model(torch.ones(1, 2))
    assert notes.backward["a"] == ANNOUNCED
    notes, _ = listen(inner := Stack(a=Stack(deep=WithAuxiliaryLoss())), "a", "a.deep")
    inner(torch.ones(1, 2))
    assert (notes.backward["a"], notes.backward["a.deep"]) == (NONE, ANNOUNCED)


class Config:
    """What a module often keeps on itself. Counts how often it is asked what it is."""

    def __init__(self) -> None:
        self.num_asked = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.num_asked += 1
        return Config


def test_what_a_module_keeps_is_judged_by_its_type_and_asked_nothing() -> None:
    model = Stack(a=Stack(x=nn.Linear(2, 2)))
    config = model.a.config = Config()
    listen(model, "a")
    config.num_asked = 0
    model(torch.ones(1, 2))
    assert config.num_asked == 0


# Forwards that are no part of a step


def test_a_recomputed_forward_is_heard_as_recompute_alone() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.a, x, use_reentrant=False)

    model = Checkpointed(a=Stack(x=nn.Linear(2, 2), y=nn.Tanh()))
    notes, _ = listen(model, "a", "a.x")
    run(model)
    events = notes.take()
    assert events[:6] == ["forward (root) 0", "forward a 0", "forward a.x 0", "end a.x", "end a", "end (root)"]
    assert events[6:] == [
        "begin backward",
        "backward (root) 0",
        "backward a 0",
        "recompute a",
        "recompute a.x",
        "backward a.x 0",
        "ready a.x",
        "end backward",
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_is_heard_as_such(mode: Callable[[], Any]) -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, _ = listen(model, "a")
    with mode():
        model(torch.ones(1, 2))
    assert notes.take() == [
        "begin (root) without gradients",
        "begin a without gradients",
        "end a without gradients",
        "end (root) without gradients",
    ]


def test_a_unit_that_runs_without_gradients_inside_a_step_is_no_part_of_it() -> None:
    class HalfFrozen(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.a(x)
            return self.b(x)

    model = HalfFrozen(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    notes, _ = listen(model, "a", "b")
    run(model)
    assert [event for event in notes.take() if " a" in event] == [
        "begin a without gradients",
        "end a without gradients",
    ]


# Gradients


def test_a_unit_is_ready_with_the_last_of_its_gradients() -> None:
    model = Stack(a=nn.Linear(2, 2))
    arrived: list[tuple[str, torch.Size]] = []
    notes = Notes()
    hooks = StepHooks(
        modules_of(model, "a"), listener=notes, on_grad=lambda unit, grad: arrived.append((unit, grad.shape))
    )
    hooks.attach()
    expect(hooks)
    notes.also = lambda event: arrived.append((event, torch.Size())) if event == "ready a" else None
    run(model)
    assert sorted(arrived[:2]) == [("a", (2,)), ("a", (2, 2))]
    assert arrived[2:] == [("ready a", ())]


def test_a_unit_whose_parameters_are_not_all_used_is_not_ready() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Partly()
    notes, hooks = listen(model)
    run(model)
    assert "ready (root)" not in notes.take()
    assert hooks.grads[ROOT].arrived == {id(model.used.weight), id(model.used.bias)}


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_a_unit_is_ready_where_a_function_returns_none_as_a_gradient_and_that_is_no_gradient() -> None:
    class Behind(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + NoGradient.apply(self.bias)

    model = Stack(a=Behind(2, 2))
    arrived: list[Tensor] = []
    notes = Notes()
    hooks = StepHooks(modules_of(model, "a"), listener=notes, on_grad=lambda unit, grad: arrived.append(grad))
    hooks.attach()
    expect(hooks)
    run(model)
    assert "ready a" in notes.take()
    assert [grad is model.a.weight for grad in arrived] == [True]


def test_a_parameter_that_is_thawed_gets_its_hook_when_it_is_expected() -> None:
    model = Stack(a=nn.Linear(2, 2))
    model.a.bias.requires_grad_(False)
    notes, hooks = listen(model, "a")
    run(model)
    assert "ready a" in notes.take()
    model.a.bias.requires_grad_(True)
    expect(hooks)
    assert hooks.grads["a"].expected == {id(model.a.weight), id(model.a.bias)}
    run(model)
    assert notes.take().count("ready a") == 1
    assert hooks.grads["a"].arrived == hooks.grads["a"].expected


def test_a_parameter_that_is_expected_again_and_again_has_one_hook() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, hooks = listen(model, "a")
    num_handles = len(hooks.handles)
    expect(hooks)
    assert len(hooks.handles) == num_handles
    run(model)
    assert notes.take().count("ready a") == 1


def test_a_frozen_parameter_is_not_waited_for() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, hooks = listen(model, "a")
    model.a.weight.requires_grad_(False)
    expect(hooks)
    run(model)
    assert "ready a" in notes.take()


def test_two_gradients_for_one_parameter_name_the_unit() -> None:
    class Reentrant(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.a.linear, x, use_reentrant=True)
            return x

    model = Reentrant(a=Giving(lambda h: h), b=nn.Linear(2, 2))
    listen(model)
    with pytest.raises(InvalidModel, match=r"a parameter of \(root\) got two gradients.*use_reentrant=False"):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_a_gradient_after_the_unit_was_closed_names_the_unit() -> None:
    class UsesAnothersWeight(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.linear(x, self.a.weight)
            return self.a(self.first(x))

    model = UsesAnothersWeight(first=nn.Linear(2, 2), a=nn.Linear(2, 2))
    notes, hooks = listen(model, "first", "a")

    def close(event: str) -> None:
        if event == "backward first 0":
            # As the engine does with a unit that backward has left.
            hooks.grads["a"].closed = True

    notes.also = close
    with pytest.raises(InvalidModel, match=r"a parameter of a got a gradient after.*auto \+ MODULE"):
        run(model)


def test_a_gradient_outside_of_any_unit_call_begins_backward_by_itself() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, _ = listen(model, "a")
    # A penalty on the weights, without a forward.
    model.a.weight.sum().backward()
    assert notes.take() == ["begin backward", "end backward"]


# Where hooks begin and end


def test_after_detach_nothing_is_heard_and_after_attach_all_is_again() -> None:
    model = Stack(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    notes, hooks = listen(model, "a", "b")
    run(model)
    expected = notes.take()
    hooks.detach()
    assert not hooks.handles
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    run(model)
    assert not notes.take()
    hooks.attach()
    expect(hooks)
    run(model)
    assert notes.take() == expected


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_a_unit_may_give_its_parameter_and_nothing_is_heard_of_it_after_detach() -> None:
    model = Stack(a=GivesWeight(), b=nn.Tanh())
    notes, hooks = listen(model, "a")
    run(model)
    expected = notes.take()
    assert expected[-5:] == ["begin backward", "backward (root) 0", "backward a 0", "ready a", "end backward"]
    hooks.detach()
    run(model)
    assert not notes.take()
    hooks.attach()
    expect(hooks)
    run(model)
    assert notes.take() == expected


def test_hooks_of_two_listeners_do_not_disturb_each_other() -> None:
    model = Stack(a=nn.Linear(2, 2))
    (one, first), (other, _) = listen(model, "a"), listen(model, "a")
    run(model)
    assert one.take() == other.take()
    first.detach()
    run(model)
    assert not one.take()
    assert other.take()


def test_units_hooks_come_before_the_users_in_forward() -> None:
    model = Stack(a=nn.Linear(2, 2))
    order: list[str] = []
    model.a.register_forward_pre_hook(lambda *_: order.append("user before"))
    model.a.register_forward_hook(lambda *_: order.append("user after"))
    for first in (False, True):
        notes = Notes()
        hooks = StepHooks(modules_of(model, "a"), listener=notes)
        hooks.attach(first=first)
        notes.also = order.append
        model(torch.ones(1, 2))
        inside = order[order.index("forward a 0") : order.index("end (root)")]
        after = ["end a", "user after"] if first else ["user after", "end a"]
        assert inside == ["forward a 0", "user before", *after]
        hooks.detach()
        order.clear()


def test_autograd_does_not_keep_hooks_and_units_alive() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, hooks = listen(model, "a")
    run(model)
    parameter = model.a.weight
    held = [weakref.ref(hooks), weakref.ref(notes), weakref.ref(hooks.grads["a"]), weakref.ref(model)]
    del model, notes, hooks
    gc.collect()
    assert [reference() for reference in held] == [None] * 4
    # And the hook of a parameter that outlives them does nothing.
    parameter.sum().backward()


def test_a_model_that_is_let_go_between_forward_and_backward_takes_its_hooks_with_the_graph() -> None:
    model = Stack(a=nn.Linear(2, 2))
    notes, hooks = listen(model, "a")
    loss = model(torch.ones(1, 2)).sum()
    held = weakref.ref(hooks)
    del model, notes, hooks, loss
    gc.collect()
    assert held() is None
