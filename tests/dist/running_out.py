"""Models that run out of memory on demand: in the forward or the backward of any of their modules, on one rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where memory runs out. `place`: how far into the model's modules, of 1."""

    rank: int
    step: int
    number: int
    place: float
    phase: str


def _run_out(device: torch.device) -> None:
    """What a full device does: a GPU's own allocator fails, on a CPU its error is raised."""
    if device.type == "cuda":
        torch.empty(2**50, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        _run_out(grad.device)


class RunsOut:
    """Raises what a full device raises, once at each of the points; `now` is the (step, pass) that is under way."""

    def __init__(self, model: nn.Module, points: list[Point], *, rank: int) -> None:
        self.left = [point for point in points if point.rank == rank]
        self.now = (-1, -1)
        # Lists of modules run no forward of their own.
        self.modules = [
            module for module in model.modules() if module is not model and not isinstance(module, nn.ModuleList)
        ]
        for number, module in enumerate(self.modules):
            module.register_forward_hook(lambda _, inputs, output, number=number: self._after(number, output))

    def _after(self, number: int, output: Any) -> Any:
        for point in self.left:
            if self.now == (point.step, point.number) and number == int(point.place * len(self.modules)):
                self.left.remove(point)
                if point.phase == "forward":
                    _run_out(output.device)
                return _FullInBackward.apply(output)
        return None
