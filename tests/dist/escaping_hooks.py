"""Programs with hooks and autograd.Functions inside of units (escaping.py)."""

from typing import Any

import torch
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor, nn

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def hook_on_an_inner_module(prepare: Prepare) -> list[Any]:
    seen: list[Tensor] = []
    net = Net()
    for block in net.blocks:
        block.up.register_forward_hook(lambda module, given, found: seen.append(found.detach().mean()))
    found = loop(prepare, net)
    return [*found, *seen]


@program
def hook_that_changes_an_inner_result(prepare: Prepare) -> list[Any]:
    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[1].up.register_forward_hook(lambda module, given, found: found * 0.5)

    return loop(prepare, Net(), before=before)


@program
def hook_that_goes_again(prepare: Prepare) -> list[Any]:
    handles: list[Any] = []

    def before(step: int, net: Any) -> None:
        if step == 8:
            handles.append(net.blocks[1].down.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,)))
        if step == 12:
            handles.pop().remove()

    return loop(prepare, Net(), before=before)


@program
def backward_hook_on_an_inner_module(prepare: Prepare) -> list[Any]:
    seen: list[Tensor] = []
    net = Net()
    for block in net.blocks:
        block.up.register_full_backward_hook(lambda module, into, out: seen.append(out[0].detach().abs().mean()))
    found = loop(prepare, net)
    return [*found, *seen]


@program
def hook_on_a_hidden_tensor(prepare: Prepare) -> list[Any]:
    seen: list[Tensor] = []

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: seen.append(grad.abs().mean()))
            return x + self.down(hidden)

    found = loop(prepare, Net(Own))
    return [*found, *seen]


@program
def global_hook(prepare: Prepare) -> list[Any]:
    seen: list[int] = []
    handles: list[Any] = []

    def hook(module: nn.Module, given: Any, found: Any) -> Any:
        seen.append(1)
        return found * 0.9 if isinstance(module, nn.Linear) and module.out_features == 16 else None

    def before(step: int, net: Any) -> None:
        if step == 9:
            handles.append(nn.modules.module.register_module_forward_hook(hook))
        if step == 12:
            handles.pop().remove()

    found = loop(prepare, Net(), before=before)
    return [*found, len(seen)]


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() - 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0].exp()


@program
def own_function(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_Doubling.apply(x.clamp(-1, 1)))

    return loop(prepare, Net(Own))


@program
def own_function_that_counts(prepare: Prepare) -> list[Any]:
    counts = [0, 0]

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            counts[0] += 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            counts[1] += 1
            return grad * 2

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Counting.apply(x))

    return loop(prepare, Net(Own), after=lambda step, net: list(counts))


@program
def straight_through(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + (x.round() - x).detach())

    return loop(prepare, Net(Own))
