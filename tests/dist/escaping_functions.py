"""Programs whose units transform functions and weights, or change torch's modes inside (escaping.py)."""

from typing import Any

import torch
import torch.nn.functional as F
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def vmap_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: row + self.down(self.inner(row)))(x)

    return loop(prepare, Net(Own))


@program
def gradient_of_a_function_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            slope = torch.func.grad(lambda value: value.square().sum())(x.detach())
            return super().forward(x + 0.1 * slope)

    return loop(prepare, Net(Own))


@program
def functional_call_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            halved = {name: value / 2 for name, value in self.up.named_parameters()}
            return x + self.down(torch.tanh(torch.func.functional_call(self.up, halved, (x,))))

    return loop(prepare, Net(Own))


@torch.library.custom_op("escaping::halved", mutates_args=())
def _halved(x: Tensor) -> Tensor:
    return x / 2


@_halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_halved.register_autograd(lambda ctx, grad: grad / 2)


@program
def custom_operation(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_halved(x))

    return loop(prepare, Net(Own))


@program
def saved_tensors_hooks_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda value: value * 0.99, lambda value: value):
                return super().forward(x)

    return loop(prepare, Net(Own))


@program
def saved_tensors_hooks_around(prepare: Prepare) -> list[Any]:
    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
            return net(x).square().mean()

    return loop(prepare, Net(), loss=loss)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-0.3, 0.3)


@program
def parametrised_weight(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            parametrize.register_parametrization(self.up, "weight", _Symmetric())

    return loop(prepare, Net(Own))


@program
def cached_parametrisation(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            parametrize.register_parametrization(self.up, "weight", _Symmetric())

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return x + self.down(torch.tanh(self.up(x) + self.up(x + 1)))

    return loop(prepare, Net(Own))


@program
def weight_norm(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            parametrizations.weight_norm(self.up)

    return loop(prepare, Net(Own))


@program
def old_weight_norm(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.weight_norm(self.up)  # type: ignore[no-untyped-call]

    return loop(prepare, Net(Own))


@program
def full_backward_hook_on_a_unit(prepare: Prepare) -> list[Any]:
    seen: list[Tensor] = []

    def hook(module: nn.Module, given: Any, found: Any) -> Any:
        seen.append(found[0].norm())
        return (given[0] * 0.9,)

    def start() -> nn.Module:
        net = Net()
        for block in net.blocks:
            block.register_full_backward_hook(hook)
        return net

    return loop(prepare, start(), after=lambda step, net: seen[-3:])


@torch.jit.ignore  # type: ignore[untyped-decorator, unused-ignore]
def _ignored(x: Tensor) -> Tensor:
    return x * 0.5


@program
def function_that_scripts_ignore(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_ignored(x))

    return loop(prepare, Net(Own))


@program
def scripted_layer(prepare: Prepare) -> list[Any]:
    scripted = torch.jit.trace(torch.tanh, torch.ones(2, 8))

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(scripted(x))

    return loop(prepare, Net(Own))


@program
def autocast_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.up(x)
            with torch.autocast("cpu", enabled=False):
                return x + self.down(torch.tanh(hidden.float()))

    return loop(prepare, Net(Own))


@program
def inference_mode_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = self.inner(x.detach()).abs().mean().item()
            return super().forward(x / (1 + scale))

    return loop(prepare, Net(Own))


@program
def forked_random_numbers(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                noise = torch.randn(8)
            return F.dropout(super().forward(x + 0.1 * noise), 0.2)

    return loop(prepare, Net(Own))


@program
def generator_as_an_argument(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, *, generator: torch.Generator) -> Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator))

    generator = torch.Generator().manual_seed(5)

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        return net(x, generator=generator).square().mean()

    return loop(prepare, Net(Own), loss=loss)


@program
def nested_checkpoints(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def middle(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).cos()  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(checkpoint(self.middle, x, use_reentrant=False))

    return loop(prepare, Net(Own))


@program
def requires_gradient_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            probe = x.detach().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(probe.pow(3).sum(), probe)
            return super().forward(x + 0.01 * slope)

    return loop(prepare, Net(Own))


@program
def layer_shared_between_units(prepare: Prepare) -> list[Any]:
    net = Net()
    for block in net.blocks[1:]:
        block.up = net.blocks[0].up
    return loop(prepare, net)
