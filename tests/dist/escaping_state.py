"""Programs whose units keep state in Python: attributes, lists, dicts, buffers (escaping.py)."""

from collections import defaultdict, deque
from typing import Any

import torch
from escaping import Block, Net, Normed, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def nothing_escapes(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net())


@program
def attribute_scale(prepare: Prepare) -> list[Any]:
    class Own(Block):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    def before(step: int, net: Any) -> None:
        net.blocks[1].scale = 1.0 if step < 10 else 0.5

    return loop(prepare, Net(Own), before=before)


@program
def counter_as_warm_up(prepare: Prepare) -> list[Any]:
    class Own(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x * min(1.0, self.calls / 6))

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].calls])


@program
def counter_only(prepare: Prepare) -> list[Any]:
    class Own(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[2].calls])


@program
def activation_kept_on_module(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.inner(x)
            return x + self.down(self.seen)

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        return net(x).square().mean() + sum(block.seen.abs().mean() for block in net.blocks) / 10

    return loop(prepare, Net(Own), loss=loss)


@program
def norm_kept_as_number(prepare: Prepare) -> list[Any]:
    class Own(Block):
        norm = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.norm = x.norm().item()
            return super().forward(x)

    return loop(prepare, Net(Own), after=lambda step, net: [block.norm for block in net.blocks])


@program
def moving_mean_in_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].mean])


@program
def moving_mean_in_place(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(x - self.mean)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].mean])


@program
def moving_square_in_place(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.square = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean(0)
            self.square.mul_(0.9).addcmul_(mean, mean, value=0.1).addcdiv_(mean, self.square, value=0.01)
            return super().forward(x / self.square)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].square])


@program
def statistics_of_two_forwards(prepare: Prepare) -> list[Any]:
    """Backward saves statistics that torch does not count as written."""

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        return (net(x) + net(x + 1) if step % 2 else net(x)).square().mean()

    return loop(prepare, Net(Normed), loss=loss)


@program
def queue_of_activations(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.queue: deque[Tensor] = deque(maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            extra = sum(self.queue) / 10 if self.queue else 0.0
            found = super().forward(x + extra)
            self.queue.append(found.detach())
            return found

    return loop(prepare, Net(Own))


@program
def losses_in_a_list(prepare: Prepare) -> list[Any]:
    losses: list[Tensor] = []

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            losses.append(hidden.square().mean())
            return x + self.down(hidden)

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        losses.clear()
        return net(x).square().mean() + torch.stack(losses).sum() / 10

    # Popped from the closure of the forward: a list of the test.
    return loop(prepare, Net(Own), loss=loss)


@program
def dict_by_name(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.stats: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            self.stats["mean"] = hidden.detach().mean()
            self.stats["rows"] = x.shape[0]
            return x + self.down(hidden)

    def after(step: int, net: Any) -> list[Any]:
        return [net.blocks[1].stats["mean"].clone(), net.blocks[1].stats["rows"]]

    return loop(prepare, Net(Own), after=after, rows=lambda step: 4 + step % 2)


@program
def counts_in_a_defaultdict(prepare: Prepare) -> list[Any]:
    counts: dict[str, int] = defaultdict(int)

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            counts["calls"] += 1
            return super().forward(x)

    return loop(prepare, Net(Own), after=lambda step, net: [counts["calls"]])


@program
def buffer_counts_and_mean(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x - self.mean)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].count.clone()])


@program
def buffer_replaced(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x - self.mean)

    return loop(prepare, Net(Own))
