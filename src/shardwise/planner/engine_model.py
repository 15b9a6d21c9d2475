"""Models of the engines: one value each for ours, torch's DDP and torch's `fully_shard`.

An engine's own costs (`Overhead`): CPU time for each operation of the program, and the copies around a collective.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from types import MappingProxyType

from shardwise.plan import Plan
from shardwise.planner.memory.events import MemoryExecutor, MemorySetting
from shardwise.planner.memory.executors.ddp_memory import DdpMemory
from shardwise.planner.memory.executors.fully_shard_memory import FullyShardMemory
from shardwise.planner.memory.executors.our_memory import OurMemory
from shardwise.planner.memory.states import UnitStates, unit_states
from shardwise.planner.memory.torch_states import ddp_states, fully_shard_states
from shardwise.program import StepProgram
from shardwise.program.build import rules_of
from shardwise.program.rules.context import Rules
from shardwise.program.rules.ddp import DDP
from shardwise.program.rules.fully_shard import FULLY_SHARD
from shardwise.program.rules.ours import OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """CPU seconds of one operation of each kind, and the copies that belong to them.

    gather, wait, free, take, reduce, deliver   the program's operations; `take` moves a unit's gradients
    step                per step, for any number of units
    buffer              per buffer that is broadcast
    stream              per tensor whose update passes through the device, with its states in host memory
    copies_out          gathered parameters are copied out of the gather buffer
    divides             gradients are divided in a separate pass
    copies_slices       slices are copied before they are summed over the replicate axis
    refreshes           unsharded parameters with another compute dtype are cast after the update
    gathers_alone       gathers run in a stream that does not wait for computation
    """

    gather: float
    wait: float
    free: float
    take: float
    reduce: float
    deliver: float
    step: float
    buffer: float = 0.0
    stream: float = 0.0
    copies_out: bool = False
    divides: bool = False
    copies_slices: bool = True
    refreshes: bool = True
    gathers_alone: bool = False

    def on(self, factor: float) -> "Overhead":
        """Return the overhead on a CPU that needs `factor` times as long."""
        seconds = (field.name for field in fields(self) if field.type is float)
        return replace(self, **{name: factor * getattr(self, name) for name in seconds})


# The CPU's time to issue the update of a tensor that passes through the device; fit_overhead.py does not fit it.
_STREAMED_TENSOR_SECONDS = 150e-6


def _ours() -> Overhead:
    """Read our engine's overhead, which benchmarks/fit_overhead.py wrote."""
    file = files("shardwise.planner").joinpath("our_overhead.toml")
    seconds = tomllib.loads(file.read_text(encoding="utf-8"))["seconds"]
    return Overhead(stream=_STREAMED_TENSOR_SECONDS, **seconds)


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
"""By engine: ours and torch's two, on the reference host (hardware/calibration.py); `host_factor` scales them for other
hosts. Ours is fitted by `python benchmarks/fit_overhead.py`, torch's to the CPU-bound rows of
benchmarks/results/step_times_h200.json.

fully_shard's `step` was fitted (3.5 ms) with a program that gathered the last unit once. One gather, wait and free were
then subtracted by hand, not fitted again. No measured row is of shard_grad_op, which lacks that second gather."""

UNIT_GRAPH_SECONDS = 110e-6
"""CPU seconds of the forward or the backward of a unit that is a CUDA graph, on the reference host: its inputs are
compared with those that were recorded, its outputs are given to autograd."""

SLOWDOWN = 0.15
"""Relative slowdown of computation during a collective. An assumption: between 0 and 0.3 the median error of published
rows changes by less than a point (benchmarks/validate_time.py); rows over several nodes suggest more."""

HOST_SLOWDOWN = 1.0
"""The same for ranks on CPUs: the cores that compute also copy and sum what is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """An engine.

    rules                  the operations of a step, and their order
    states                 bytes of a unit on a rank
    memory                 executor for what operations allocate and free
    overhead               CPU time of operations, and the copies that belong to them
    keeps_program_order    all ranks issue collectives in the program's order: a rank also gathers units that it does
                           not call, and, if parameters are sharded, a unit with early gradients waits for its turn
    grads_leave_at_once    each gradient is freed as soon as autograd has accumulated it
    autocasts              parameters stay in the optimizer's dtype, and autocast copies them
    takes_workspaces_first those of matrix products are allocated before the first step
    has_own_groups         gathers have a communicator of their own, and other collectives one
    error_band             error band of memory predictions: the goal, until validation replaces it
    """

    rules: Rules
    states: Callable[..., UnitStates]
    memory: Callable[[StepProgram, MemorySetting], MemoryExecutor]
    overhead: Overhead
    keeps_program_order: bool = False
    grads_leave_at_once: bool = False
    autocasts: bool = False
    takes_workspaces_first: bool = False
    has_own_groups: bool = False
    error_band: float


_MODELS = (
    EngineModel(
        rules=OURS,
        states=unit_states,
        memory=OurMemory,
        overhead=OVERHEADS["shardwise"],
        keeps_program_order=True,
        takes_workspaces_first=True,
        has_own_groups=True,
        error_band=0.03,
    ),
    EngineModel(
        rules=DDP,
        states=ddp_states,
        memory=DdpMemory,
        overhead=OVERHEADS["ddp"],
        grads_leave_at_once=True,
        autocasts=True,
        error_band=0.05,
    ),
    EngineModel(
        rules=FULLY_SHARD,
        states=fully_shard_states,
        memory=FullyShardMemory,
        overhead=OVERHEADS["fully_shard"],
        error_band=0.05,
    ),
)
ENGINE_MODELS: Mapping[str, EngineModel] = MappingProxyType({model.rules.name: model for model in _MODELS})
"""By the name of the rules."""


def engine_model_of(plan: Plan) -> EngineModel:
    return ENGINE_MODELS[rules_of(plan).name]
