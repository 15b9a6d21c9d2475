"""Measures copies between a GPU and host memory, and updates by the CPU, in about a second."""

import statistics
import time
from collections.abc import Callable

import torch

from shardwise.hardware.host_memory_speed import HostMemorySpeed

_COPIED_BYTES = 2**28
_UPDATED_ELEMENTS = 2**25
_NUM_TIMINGS = 5


def measured_host_memory(device: torch.device) -> HostMemorySpeed:
    """Measure the host memory of a GPU."""
    to_host, to_device = (_copy(device, to_host=one) for one in (True, False))

    def both() -> None:
        to_host()
        to_device()

    one_way = statistics.mean(_seconds(copy, device=device) for copy in (to_host, to_device))
    return HostMemorySpeed(
        copy_bytes_per_s=_COPIED_BYTES / one_way,
        both_bytes_per_s=_COPIED_BYTES / _seconds(both, device=device),
        updates_per_s=_UPDATED_ELEMENTS / _update_seconds(),
    )


def _copy(device: torch.device, *, to_host: bool) -> Callable[[], None]:
    """Return a copy on a stream of its own."""
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target, source = (here, there) if to_host else (there, here)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    return copy


def _seconds(call: Callable[[], None], *, device: torch.device) -> float:
    times = []
    for _ in range(_NUM_TIMINGS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _update_seconds() -> float:
    """Return the seconds of an update in fp32, with the cast of its result."""
    master = torch.zeros(_UPDATED_ELEMENTS, pin_memory=True).requires_grad_()
    master.grad = torch.zeros(_UPDATED_ELEMENTS, pin_memory=True)
    cast = torch.zeros(_UPDATED_ELEMENTS, dtype=torch.bfloat16, pin_memory=True)
    optimizer = torch.optim.AdamW([master], fused=True)
    times = []
    for _ in range(_NUM_TIMINGS):
        began = time.perf_counter()
        optimizer.step()
        cast.copy_(master.detach())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
