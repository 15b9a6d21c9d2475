"""Models of the engines: one value each for ours, torch's DDP and torch's `fully_shard`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.plan import Plan
from shardwise.planner.memory.executors.ddp_memory import DdpMemory
from shardwise.planner.memory.executors.fully_shard_memory import FullyShardMemory
from shardwise.planner.memory.executors.our_memory import OurMemory
from shardwise.planner.memory.executors.setting import MemoryExecutor, MemorySetting
from shardwise.planner.memory.states import UnitStates, unit_states
from shardwise.planner.memory.torch_states import ddp_states, fully_shard_states
from shardwise.planner.overhead import OVERHEADS, Overhead
from shardwise.program import StepProgram
from shardwise.program.rules import rules_of
from shardwise.program.rules.context import Rules
from shardwise.program.rules.ddp import DDP
from shardwise.program.rules.fully_shard import FULLY_SHARD
from shardwise.program.rules.ours import OURS


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
