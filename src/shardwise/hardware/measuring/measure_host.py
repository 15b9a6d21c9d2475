"""Measures the CPU's time to issue operations to a device, and the time of an optimizer's step."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.hardware.measuring.measure import cpu_clock, synchronize

_LENGTH = 24
_NUM_TIMINGS = 7
# The first one warms up.
_NUM_TURNS = 31
_NUM_STEPS = 3
# So small that every device finishes before the CPU has issued the next operation.
_ROWS, _WIDTH, _HEADS = 16, 64, 2

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw-fused": lambda tensors: torch.optim.AdamW(tensors, lr=1e-4, fused=True),
    "adamw-foreach": lambda tensors: torch.optim.AdamW(tensors, lr=1e-4, foreach=True),
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=1e-4, momentum=0.9),
}


class _Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class _Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class _View(nn.Module):
    """Only views, which launch nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(_ROWS, _HEADS, -1).transpose(0, 1).transpose(0, 1).reshape(_ROWS, -1)


class _Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, _ROWS, _HEADS, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(_ROWS, -1)


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(_WIDTH, _WIDTH),
    "linear_without_bias": lambda: nn.Linear(_WIDTH, _WIDTH, bias=False),
    "layer_norm": lambda: nn.LayerNorm(_WIDTH),
    "rms_norm": lambda: nn.RMSNorm(_WIDTH),
    "gelu": _Act,
    "add": _Residual,
    "view": _View,
    "attention": _Attend,
}
_IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False),
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "relu": nn.ReLU,
}


def dispatch_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield, for each kind of layer, the CPU's seconds per layer in forward and in backward.

    The kinds are measured in turns, and the median of the turns counts: the load of a shared host changes within
    seconds, and would otherwise be attributed to the layer being measured.
    """
    chains = list(layer_chains(device))
    turns = [[chain_seconds(chain, x) for _, chain, x in chains] for _ in range(_NUM_TURNS)]
    for number, (name, _, _) in enumerate(chains):
        forward, backward = (statistics.median(turn[number][way] for turn in turns[1:]) for way in (0, 1))
        yield {"name": "dispatch", "role": name, "forward": forward, "backward": backward}


def layer_chains(device: torch.device) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield (kind, a chain of such layers, an input)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for layers, shape in ((_LAYERS, (_ROWS, _WIDTH)), (_IMAGE_LAYERS, (2, 8, 8, 8))):
        for name, make in layers.items():
            chain = nn.Sequential(*(make() for _ in range(_LENGTH))).to(device, dtype)
            yield name, chain, torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def chain_seconds(chain: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return (forward, backward) seconds per layer until the call returns, not until the device is done."""
    now = _clock(x.device)
    synchronize(x.device)
    began = now()
    out = chain(x)
    forward = now() - began
    grad = torch.ones_like(out)
    synchronize(x.device)
    began = now()
    out.backward(grad)
    backward = now() - began
    chain.zero_grad()
    x.grad = None
    return forward / _LENGTH, backward / _LENGTH


def update_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield, for each optimizer with few large or many small tensors, the seconds to issue a step and per step."""
    large = (8, 2**24) if device.type == "cuda" else (8, 2**16)
    for name, make in OPTIMIZERS.items():
        for num_tensors, num_elements in (large, (50, 1024), (300, 1024)):
            tensors = [torch.zeros(num_elements, device=device, requires_grad=True) for _ in range(num_tensors)]
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            launch, total = _update_seconds(make(tensors), device=device)
            yield {
                "name": "update",
                "role": name,
                "num_tensors": num_tensors,
                "num_elements": num_tensors * num_elements,
                "launch": launch,
                "seconds": total,
            }


def _update_seconds(optimizer: torch.optim.Optimizer, *, device: torch.device) -> tuple[float, float]:
    """Return (seconds until a step is issued, seconds per step of several issued back to back)."""
    now = _clock(device)
    launches, totals = [], []
    for _ in range(_NUM_TIMINGS + 2):
        synchronize(device)
        began = now()
        optimizer.step()
        launches.append(now() - began)
        synchronize(device)
        one = now() - began
        for _ in range(_NUM_STEPS):
            optimizer.step()
        synchronize(device)
        totals.append((now() - began - one) / _NUM_STEPS)
    return statistics.median(launches[2:]), statistics.median(totals[2:])


def _clock(device: torch.device) -> Callable[[], float]:
    """Return the wall clock for a GPU, whose backward is issued by autograd's own threads."""
    return time.perf_counter if device.type == "cuda" else cpu_clock()
