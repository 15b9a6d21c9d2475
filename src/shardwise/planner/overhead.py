"""What an engine itself costs: the CPU's time for each operation of the program, and the copies around a collective."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds of the CPU for one operation of a kind, and which copies go with them.

    gather, wait, free, take, reduce, deliver   the program's operations; `take` moves a unit's gradients
    step                what a step costs however many units there are
    buffer              for each buffer that is broadcast
    copies_out          gathered parameters are copied out of the buffer that was gathered into
    divides             gradients are divided in a pass of their own
    copies_slices       what is summed over a second axis of the mesh is copied out first
    refreshes           whole parameters that compute in another dtype are cast after the update
    gathers_alone       gathers run in a stream that waits for nothing that computes
    """

    gather: float
    wait: float
    free: float
    take: float
    reduce: float
    deliver: float
    step: float
    buffer: float = 0.0
    copies_out: bool = False
    divides: bool = False
    copies_slices: bool = True
    refreshes: bool = True
    gathers_alone: bool = False

    def on(self, factor: float) -> "Overhead":
        """On a CPU that needs `factor` times as long."""
        seconds = (field.name for field in fields(self) if field.type is float)
        return replace(self, **{name: factor * getattr(self, name) for name in seconds})


def _ours() -> Overhead:
    """Our engine's, as benchmarks/fit_overhead.py wrote them."""
    file = files("shardwise.planner").joinpath("our_overhead.toml")
    return Overhead(**tomllib.loads(file.read_text(encoding="utf-8"))["seconds"])


OVERHEADS: Mapping[str, Overhead] = MappingProxyType(
    {
        "shardwise": _ours(),
        "ddp": Overhead(
            gather=0.0, wait=10e-6, free=0.0, take=20e-6, reduce=20e-6, deliver=10e-6, step=0.5e-3, divides=True,
            refreshes=False,
        ),
        "fully_shard": Overhead(
            gather=880e-6, wait=350e-6, free=210e-6, take=170e-6, reduce=620e-6, deliver=10e-6, step=2.06e-3,
            copies_out=True, divides=True, copies_slices=False, refreshes=False, gathers_alone=True,
        ),
    }
)  # fmt: skip
"""By engine: ours, and torch's two, on the reference host (hardware/host_speed.py); on others they go with
`host_factor`. Ours are fitted by `python benchmarks/fit_overhead.py`, torch's to the rows of
benchmarks/results/step_times_h200.json that the CPU bounds.

fully_shard's `step` was fitted (3.5 ms) with a program that gathered the last unit once. One gather, wait and free were
then taken off it by hand, not fitted again. No measured row is of shard_grad_op, which lacks that second gather."""

FOREIGN_TENSOR_SECONDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"deepspeed": MappingProxyType({"zero2": 0.35e-3, "shard_grad_op": 1.2e-3, "fsdp": 1.2e-3})}
)
"""Engine that is neither ours nor torch's → strategy → seconds that a step takes longer than ours for each tensor of
parameters: hooks that copy, reduce or gather it by itself, and wait. Of DeepSpeed's ZeRO-2 and ZeRO-3, fitted to its
published rows of GPT-2 and BERT on 16 V100s, of 2021; its ZeRO-1 and plain data parallelism take as long as ours."""

CAPTURED = Overhead(gather=0.0, wait=0.0, free=0.0, take=0.0, reduce=0.0, deliver=0.0, step=0.0)
"""Of a step that is one CUDA graph."""

GRAPH_LAUNCH_SECONDS = 20e-6
"""Of a captured step, whatever it holds."""

SLOWDOWN = 0.15
"""By how much what is computed takes longer while a collective is under way. An assumption: between 0 and 0.3 the
median error of published rows changes by less than a point (benchmarks/validate_time.py); those over nodes ask for
more."""

HOST_SLOWDOWN = 1.0
"""The same where the ranks are CPUs: what is sent is copied and summed by the very cores that compute."""
