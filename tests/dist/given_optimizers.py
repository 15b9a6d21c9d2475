"""Optimizers that look at elements, blocks, tensors or all parameters; importable by ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.models.muon import MuonWithAdamW

T = TypeVar("T")


def tried_soon(body: Callable[..., T]) -> Callable[..., T]:
    """A body of ranks in which `prepare` tries an optimizer for 2 steps instead of 10: on CPUs without bf16 Muon's take
    long.
    """

    @wraps(body)
    def sooner(*args: Any, **options: Any) -> T:
        with patch("shardwise.engine.optimizer.reach.NUM_STEPS", 2):
            return body(*args, **options)

    return sooner


class Stepping(Optimizer):
    """The loop that all of these share: `update` changes one parameter in place, given its state and options."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        raise NotImplementedError


def momentum(p: Tensor, state: dict[str, Any]) -> Tensor:
    return state.setdefault("momentum", torch.zeros_like(p))  # type: ignore[no-any-return]


class Lion(Stepping):
    """Elementwise."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        m = momentum(p, state)
        direction = (0.9 * m + 0.1 * g).sign()
        p.sub_(self.masked(direction, g), alpha=options["lr"])
        m.mul_(0.99).add_(g, alpha=0.01)

    def masked(self, direction: Tensor, g: Tensor) -> Tensor:
        return direction


class CautiousLion(Lion):
    """The mask is scaled by its mean over the tensor."""

    def masked(self, direction: Tensor, g: Tensor) -> Tensor:
        mask = (direction * g > 0).to(g.dtype)
        return direction * mask / mask.mean().clamp(min=1e-3)


class Plain(torch.optim.AdamW):
    """A subclass that changes nothing."""


class Lars(torch.optim.SGD):
    """A trust ratio of norms, in a subclass of an elementwise optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm = p.grad.norm()
                    p.grad.mul_(torch.where(norm > 0, 0.1 * p.norm() / (norm + 1e-9), 1.0))
        return super().step(closure)


class Lamb(Stepping):
    """Adam, scaled by a trust ratio."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        m, v = momentum(p, state), state.setdefault("square", torch.zeros_like(p))
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.01)
        update = m / (v.sqrt() + 1e-6)
        p.sub_(update * (p.norm() / update.norm().clamp(min=1e-9)).clamp(max=10), alpha=options["lr"])


class UpdateClipping(Stepping):
    """Looks at the tensor only where an update is large, which ordinary gradients do not bring about."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        m = momentum(p, state)
        m.lerp_(g, 0.1)
        largest = m.abs().amax()
        p.sub_(m / torch.where(largest > 1e4, largest, 1.0), alpha=options["lr"])


class TinyFloor(Stepping):
    """Looks at the tensor only where all of its gradients are tiny."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        rms = g.square().mean().sqrt()
        p.sub_(g * torch.where(rms < 1e-6, 1e-2 / rms, 1.0), alpha=options["lr"])


class BlockAdam(Stepping):
    """Adam with 8-bit states: a scale for every `block` elements, counted through the tensor."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        block = options["block"]
        if not state:
            for name in ("first", "second"):
                state[name] = torch.zeros_like(p, dtype=torch.uint8).fill_(127)
                state[f"{name}_scale"] = torch.zeros(-(-p.numel() // block), dtype=p.dtype, device=p.device)
        for name, decay, new in (("first", 0.9, g), ("second", 0.99, g * g)):
            scale = state[f"{name}_scale"].repeat_interleave(block)[: p.numel()].view_as(p)
            old = (state[name].to(p.dtype) - 127) / 127 * scale
            self._keep(state, name, old * decay + new * (1 - decay), block)
        first, second = (
            (state[name].to(p.dtype) - 127)
            / 127
            * state[f"{name}_scale"].repeat_interleave(block)[: p.numel()].view_as(p)
            for name in ("first", "second")
        )
        p.sub_(first / (second.clamp(min=0).sqrt() + 0.1), alpha=options["lr"])

    def _keep(self, state: dict[str, Any], name: str, value: Tensor, block: int) -> None:
        flat = value.reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
        scale = blocks.abs().amax(dim=1)
        state[f"{name}_scale"].copy_(scale)
        levels = (blocks / scale.clamp(min=1e-30)[:, None] * 127).round() + 127
        state[name].copy_(levels.reshape(-1)[: flat.numel()].view_as(value).to(torch.uint8))


class Switched(Stepping):
    """Schedule-free SGD: a parameter is y while it trains and the average x while it evaluates."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, train_mode=False, num_steps=0)

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called. Please insert .train()")
        super().step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        weight = 1 / (options["num_steps"] + 1)
        p.lerp_(z, weight).add_(g, alpha=options["lr"] * (0.9 * (1 - weight) - 1))
        z.sub_(g, alpha=options["lr"])

    def train(self) -> None:
        self._switch(to=True, weight=1 - 0.9)

    def eval(self) -> None:
        self._switch(to=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def _switch(self, *, to: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = to


class FullBlockAdam(BlockAdam):
    """As torchao's: states are quantised where a tensor has full blocks and is large, and plain elsewhere."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        if p.numel() >= 4096 and p.numel() % 256 == 0:
            super().update(p, g, state, {**options, "block": 256})
        else:
            first = state.setdefault("first", torch.zeros_like(p))
            first.lerp_(g, 0.1)
            p.sub_(first, alpha=options["lr"])


class Prodigy(Stepping):
    """A step size from sums over all parameters, kept in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["total"] = group.get("total", 0.0) + total
        return super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        p.sub_(g, alpha=options["lr"] / (1 + options["total"]))


class LayerDecay(Stepping):
    """A learning rate by a parameter's place in its group, which is another where a rank holds no slice of some."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * 0.9**number)


class Noisy(Stepping):
    """Adds noise, of which slices would get other values."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        p.sub_(g + torch.randn_like(g), alpha=options["lr"])


class Elsewhere(Stepping):
    """Steps parameters that it keeps beside its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.kept = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.kept:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.defaults["lr"])


class ByDimensions(Stepping):
    """Scales matrices by their norm, and leaves vectors elementwise."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        m = momentum(p, state)
        m.lerp_(g, 0.1)
        p.sub_(m / (1 + m.norm()) if p.dim() > 1 else m, alpha=options["lr"])


class Shampoo(Stepping):
    """A preconditioner for each side of a matrix: states of other shapes than the parameter's."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        matrix = g.reshape(p.shape[0], -1) if p.dim() > 1 else g.reshape(1, -1)[:, :8]
        left = state.setdefault("left", torch.eye(matrix.shape[0], dtype=p.dtype) * 1e-3)
        right = state.setdefault("right", torch.eye(matrix.shape[1], dtype=p.dtype) * 1e-3)
        left.add_(matrix @ matrix.T)
        right.add_(matrix.T @ matrix)
        scale = left.diagonal().pow(-0.25)[:, None] * right.diagonal().pow(-0.25)[None]
        update = (scale * matrix).view_as(p) if p.dim() > 1 else g * scale.mean()
        p.sub_(update, alpha=options["lr"])


def muon(parameters: Any) -> Optimizer:
    """Of the matrices; nobody trains the rest. One iteration: on a CPU without bf16 its products take long."""
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=2e-2, ns_steps=1)


def muon_with_adamw(parameters: Any) -> Optimizer:
    """As train makes it, in three param groups."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() == 1]
    others = [{"params": vectors[::2]}, {"params": vectors[1::2], "weight_decay": 0.0}]
    return MuonWithAdamW(
        matrices, others, lr=1e-2, muon={"weight_decay": 0.2, "ns_steps": 1}, adamw={"betas": (0.8, 0.9)}
    )


def lars(parameters: Any) -> Optimizer:
    """Whose step calls that of SGD, with hooks of its own once there has been one."""
    torch.optim.SGD([torch.zeros(1)])
    return Lars(parameters, lr=0.1, momentum=0.9)
