"""Programs that use torch's modes, checkpoints and values around and inside of units, and errors (escaping.py)."""

from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from escaping import Block, Net, Normed, Prepare, Program, batches, loop
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def evaluation_in_between(prepare: Prepare) -> list[Any]:
    def after(step: int, net: Any) -> list[Any]:
        net.eval()
        with torch.no_grad():
            found = net(torch.ones(3, 8))
        net.train()
        return [found]

    return loop(prepare, Net(), after=after)


@program
def inference_mode_in_between(prepare: Prepare) -> list[Any]:
    def after(step: int, net: Any) -> list[Any]:
        with torch.inference_mode():
            return [net(torch.ones(3, 8)).clone()]

    return loop(prepare, Net(), after=after)


@program
def autocast_now_and_then(prepare: Prepare) -> list[Any]:
    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=step % 4 == 3):
            return net(x).float().square().mean()

    return loop(prepare, Net(), loss=loss)


@program
def no_grad_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            return super().forward(x / (scale + 1))

    return loop(prepare, Net(Own))


class _Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.tanh else found


@program
def function_mode_now_and_then(prepare: Prepare) -> list[Any]:
    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        with _Halving() if step % 4 == 3 else nullcontext():
            return net(x).square().mean()

    return loop(prepare, Net(), loss=loss)


@program
def patched_method_of_a_block(prepare: Prepare) -> list[Any]:
    def before(step: int, net: Any) -> None:
        if step == 9:
            block = net.blocks[0]
            block.inner = lambda x: torch.relu(block.up(x))

    return loop(prepare, Net(), before=before)


@program
def patched_function_of_torch(prepare: Prepare) -> list[Any]:
    before_all = torch.tanh

    def before(step: int, net: Any) -> None:
        if step == 9:
            torch.tanh = lambda x: before_all(x) * 0.5

    try:
        return loop(prepare, Net(), before=before)
    finally:
        torch.tanh = before_all


def _checkpointed(*, p: float) -> type[nn.Module]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda y: self.down(F.dropout(self.inner(y), p)), x, use_reentrant=False)

    return Own


@program
def checkpoint_inside(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net(_checkpointed(p=0.0)))


@program
def checkpoint_with_dropout_inside(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net(_checkpointed(p=0.3)))


@program
def checkpoint_around(prepare: Prepare) -> list[Any]:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return loop(prepare, Net(run=run))


@program
def checkpoint_around_buffers(prepare: Prepare) -> list[Any]:
    """Statistics are written in forward, and again in backward."""

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return loop(prepare, Net(Normed, run=run))


@program
def recomputed_with_dropout(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.dropout(self.inner(x), 0.3))

    return loop(prepare, Net(Own), recompute="full")


@program
def recomputed_with_buffers(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net(Normed), recompute="full")


@program
def batch_norm(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net(Normed))


@program
def branch_by_a_value(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.mean() > 0 else -x)

    return loop(prepare, Net(Own))


@program
def item_as_a_factor(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / max(x.abs().max().item(), 1.0))

    return loop(prepare, Net(Own))


@program
def shapes_by_values(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            picked = x[x.sum(-1) > 0]
            return super().forward(x) + picked.sum() / 10

    return loop(prepare, Net(Own))


@program
def error_in_a_unit(prepare: Prepare) -> list[Any]:
    class Own(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("not this one")
            return super().forward(x)

    def before(step: int, net: Any) -> None:
        if step in (5, 10):
            net.blocks[1].fails = True
            with suppress(ValueError):
                net(torch.ones(4, 8))
            net.blocks[1].fails = False

    return loop(prepare, Net(Own), before=before)


@program
def error_in_the_loss(prepare: Prepare) -> list[Any]:
    net, optimizer = prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=1e-2))
    seen: list[Any] = []
    for step, x in enumerate(batches(16, rows=lambda step: 4)):
        with suppress(ZeroDivisionError):
            found = net(x)
            seen.append(found.detach().clone())
            (found.square().mean() * (1 / (0 if step % 6 == 5 else 1))).backward()
            optimizer.step()
        optimizer.zero_grad()
    return seen


@program
def frozen_in_between(prepare: Prepare) -> list[Any]:
    def before(step: int, net: Any) -> None:
        if step in (6, 10):
            net.blocks[1].up.weight.requires_grad_(step == 10)

    return loop(prepare, Net(), before=before)


@program
def compiled_by_the_user(prepare: Prepare) -> list[Any]:
    act = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")

    class Own(Block):
        def inner(self, x: Tensor) -> Tensor:
            return act(self.up(x))

    return loop(prepare, Net(Own))


@program
def two_models_in_turn(prepare: Prepare) -> list[Any]:
    pairs = [prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=1e-2)) for _ in range(2)]
    seen: list[Any] = []
    for x in batches(12, rows=lambda step: 4):
        for net, optimizer in pairs:
            found = net(x).square().mean()
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(found.detach())
    return seen
