"""Measures this host in about five seconds, most of which torch needs to start.

python -m shardwise.hardware.measuring.probe_host [--device cuda|cpu]

Prints a HostSpeed as JSON. A GPU's kernels are issued, never waited for: the numbers are the CPU's.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from shardwise.hardware.calibration import HostSpeed
from shardwise.hardware.measuring.measure_host import chain_seconds, layer_chains
from shardwise.hardware.measuring.measure_host_memory import measured_host_memory

_PROBE_SECONDS = 3.0
_NUM_CALLS = 300
# Long compared with the time slices of an operating system.
_SHARE_SECONDS = 0.02


class HostWatch:
    """Measures a host in turns, because the load of a shared host changes from second to second.

    A turn takes about 40 ms and contains all kinds of calls. To time something else on the same host, interleave it
    with turns. `speed` is the mean over the middle half of the turns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chains = list(layer_chains(device))
        self._call, self._hooked = _Called().call, _hooked()
        self._turns: list[dict[str, float]] = []
        self._passed = self._used = 0.0
        self.warm_up()

    def warm_up(self) -> None:
        """Run one turn without measuring it: this loads kernels and fills caches after other work."""
        for _, chain, x in self._chains:
            chain_seconds(chain, x)

    def turn(self) -> None:
        found = {"call": _seconds_of(self._call), "hook": _seconds_of(self._hooked)}
        for kind, chain, x in self._chains:
            found[f"{kind} forward"], found[f"{kind} backward"] = chain_seconds(chain, x)
        self._turns.append(found)
        passed, used = seconds_on_core(_SHARE_SECONDS)
        self._passed, self._used = self._passed + passed, self._used + used

    def speed(self) -> HostSpeed:
        """Return the speed over all turns so far."""
        middle = {name: _middle([turn[name] for turn in self._turns]) for name in self._turns[0]}
        on_gpu = self._device.type == "cuda"
        title = torch.cuda.get_device_name(self._device) if on_gpu else "cpu"
        return HostSpeed(
            source=f"host probe, torch {torch.__version__}, Python {platform.python_version()}, {title}",
            call_seconds=middle["call"],
            hook_seconds=middle["hook"],
            dispatch_seconds={
                kind: {way: middle[f"{kind} {way}"] for way in ("forward", "backward")} for kind, _, _ in self._chains
            },
            # The other times use the thread's own clock or leave out the slowest, and so ignore the core's other users.
            share=max(self._passed / max(self._used, 1e-9), 1.0),
        )


def probe_host(device: torch.device, *, seconds: float = _PROBE_SECONDS) -> HostSpeed:
    """Measure how fast the CPU of this process issues work to `device`, and the host memory of a GPU."""
    watch = HostWatch(device)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        watch.turn()
    memory = measured_host_memory(device) if device.type == "cuda" else None
    return replace(watch.speed(), memory=memory)


def seconds_on_core(seconds: float) -> tuple[float, float]:
    """Keep a core busy; return (wall seconds, seconds that this thread was on a core)."""
    began, on_core = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        sum(range(1000))
    return time.perf_counter() - began, time.thread_time() - on_core


def _middle(values: list[float]) -> float:
    ordered, quarter = sorted(values), len(values) // 4
    return statistics.fmean(ordered[quarter : len(values) - quarter])


class _Called:
    def __init__(self) -> None:
        self.count = 0

    def call(self) -> None:
        self.count += 1


def _hooked() -> Callable[[], object]:
    module, x = nn.Identity(), torch.zeros(1)
    module.register_forward_pre_hook(lambda module, args: None)
    module.register_forward_hook(lambda module, args, output: None)
    return lambda: module(x)


def _seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call, on the thread's own clock."""
    began = time.thread_time()
    for _ in range(_NUM_CALLS):
        call()
    return (time.thread_time() - began) / _NUM_CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        # As ranks on CPUs compute, and as `calibrate` measures them.
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    print(json.dumps(probe_host(device).to_data()))


if __name__ == "__main__":
    main()
