"""The settings of another tool's file, as a plan."""

from dataclasses import dataclass, replace

from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan
from shardwise.plan.patterns import AUTO_UNITS

ZERO_STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
"""DeepSpeed's stage → strategy."""
FSDP_STRATEGIES = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "fsdp",
    "HYBRID_SHARD_ZERO2": "shard_grad_op",
}
"""torch's sharding strategy (FSDP version 1) → strategy, in the order of torch's numbers, from 1 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSetup:
    """A setup of another tool.

    tool             the tool that the file belongs to
    plan             the closest plan of Shardwise; recognise.py sets its engine
    settings         the settings of the file, and which of them are wrong
    num_ranks        ranks of the job; None if the file does not say
    foreign          the engine that runs it, for the planner's times ("" for torch's own)
    left_out         one line per setting that a plan cannot express
    master_dtype     dtype of the weights that the optimizer updates
    wraps            classes that become units; None if the tool or the model decides
    """

    tool: str
    plan: Plan
    settings: Settings
    num_ranks: int | None = None
    foreign: str = ""
    left_out: tuple[str, ...] = ()
    master_dtype: str = "fp32"
    wraps: tuple[str, ...] | None = None

    @property
    def planned(self) -> Plan:
        """Return the plan whose cost is predicted: the catalogue has its own class names, so its own cut is taken."""
        is_of_others = self.tool != "shardwise" and self.plan.units.startswith("class:")
        return replace(self.plan, units=AUTO_UNITS) if is_of_others else self.plan


def units_of(wraps: tuple[str, ...] | None, *, wraps_nothing: bool) -> str:
    """Return the unit policy of a plan for what is wrapped."""
    if wraps_nothing:
        return "none"
    return f"class:{','.join(wraps)}" if wraps else "auto"
