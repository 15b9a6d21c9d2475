"""Models and loops that torch allows and engines trip over: gradients that are None, memory with two names, jit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scenario_rows.networks import WIDTH, Block, Experts, Net
from scenario_rows.optimizers import Training, inputs, square
from scenario_rows.runners import NUM_RANKS, Runner, Weights
from torch import Tensor, nn


class GainWithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gain,) = ctx.saved_tensors
        return grad * gain, None


class LeftOut(nn.Module):
    """A block with a layer that gets no gradient: never called, called under no_grad, or by a function of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if how == "function" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.layer(x) + self.other(x).detach() + x
        if self.how == "function":
            x = GainWithoutGradient.apply(x, self.gain) + self.other(x)
        return x + torch.tanh(self.layer(x))


def of_blocks(make: Callable[[], nn.Module]) -> nn.Module:
    model = Net()
    model.blocks[0], model.blocks[1] = make(), make()
    return model


def stem_under_no_grad() -> nn.Module:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Frozen()


def idle_expert() -> nn.Module:
    """One of the experts is chosen by no sample of any rank."""
    model = Experts()
    with torch.no_grad():
        model.gate.bias[3] = -100.0
    return model


class Viewed(Block):
    """Computes with a part of its weight under another name: a buffer, or an attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        row = self.down.weight.detach()[0, :WIDTH]
        if buffer:
            self.register_buffer("row", row)
        else:
            self.row = row

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.row))


def gradient_before(runner: Runner, *, counts: bool) -> Weights:
    """Run a backward before `prepare`. Its gradient is cleared by the first step, or part of it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model, 50, 0).backward()
    training = Training(runner, model, optimizer)
    if counts:
        runner.step(optimizer, lambda share: square(training.called, 20, share), keeps=True)
    return training.train(3)


class Gain(nn.Parameter):
    """A parameter with a method of its own."""

    def applied(self, x: Tensor) -> Tensor:
        return x * (1 + self)


class Gained(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gain.applied(x))


class Marked(Block):
    """Reads what was noted on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.scale = 1.1  # type: ignore[assignment]
        self.down.bias.scale = torch.full((WIDTH,), 0.9)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.up.weight.scale) * self.down.bias.scale


def compiled_by_jit(how: str) -> nn.Module:
    model = Net()
    if how == "script":
        model.blocks[0] = torch.jit.script(model.blocks[0])
    else:
        model.head = torch.jit.trace(model.head, torch.zeros(4, WIDTH))
    return model


def inference_mode(runner: Runner) -> Weights:
    """Evaluate under torch.inference_mode before the first step and after each."""
    training = Training(runner, Net())

    @torch.inference_mode()
    def evaluated() -> Tensor:
        found: Tensor = training.called(inputs(0, 9))
        return found.clone()

    losses = [evaluated(), *(evaluated() for _ in training.steps(3))]
    return {"evaluated": torch.stack(losses), **training.weights()}


def state_between_passes(runner: Runner) -> Weights:
    """Read the state before the second pass of each step."""
    training = Training(runner, Net())
    seen: Weights = {}

    def loss(called: Any, step: int, share: int) -> Tensor:
        if share >= NUM_RANKS:
            seen.update({f"{step}.{name}": value for name, value in runner.weights(training.model).items()})
        return square(called, step, share)

    return {**training.train(3, loss, passes=2), **seen}


def names_on_one_rank(runner: Runner) -> Weights:
    """Rank 0 alone reads the names of a part's state, as PEFT does."""
    training = Training(runner, Net())
    for _ in training.steps(2):
        if runner.rank == 0:
            assert "up.weight" in training.model.blocks[0].state_dict()
    return training.weights()


def _trained(make: Callable[[], nn.Module]) -> Callable[[Runner], Weights]:
    return lambda runner: Training(runner, make()).train(4)


def _of_blocks(make: Callable[[], nn.Module]) -> Callable[[Runner], Weights]:
    return _trained(partial(of_blocks, make))


ROWS: dict[str, Callable[[Runner], Weights]] = {
    "a weight whose autograd.Function returns no gradient": _of_blocks(partial(LeftOut, "function")),
    "layers that are never called": _of_blocks(partial(LeftOut, "never called")),
    "an expert that no sample is sent to": _trained(idle_expert),
    "blocks under no_grad": _of_blocks(partial(LeftOut, "no_grad")),
    "a first layer under no_grad": _trained(stem_under_no_grad),
    "a buffer that is a view of a weight": _of_blocks(partial(Viewed, buffer=True)),
    "an attribute that is a view of a weight": _of_blocks(partial(Viewed, buffer=False)),
    "a gradient from before prepare, cleared": partial(gradient_before, counts=False),
    "a gradient from before prepare, part of the first step": partial(gradient_before, counts=True),
    "a subclass of nn.Parameter": _of_blocks(Gained),
    "attributes on parameters": _of_blocks(Marked),
    "a block of torch.jit.script": _trained(partial(compiled_by_jit, "script")),
    "a head of torch.jit.trace": _trained(partial(compiled_by_jit, "trace")),
    "evaluation under inference_mode": inference_mode,
    "a state read between two passes": state_between_passes,
    "the names of a part's state, on one rank": names_on_one_rank,
}
