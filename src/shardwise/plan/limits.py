"""What each engine can run: which placements, which settings of a plan, and the sentence that refuses the rest.

    Plan          refuses, where it is made, what its engine can do nothing with (`check_settings`)
    prepare       refuses what the engine cannot run (`EngineLimits.why_not`)
    search, CLI   try only strategies and plans that the engine can run (`strategies_of`, `why_not`)
    bench         says in a few words why a case did not run (`Refusal.lacks`)

A plan that prepare refuses can still be costed: a model may recompute by itself, for example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from shardwise.errors import InvalidPlan
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import AUTO, SHARDED, STRATEGIES, Placement, placement_of, strategy_of
from shardwise.vocabulary.categories import GATHERED, REDUCE

Placements = Mapping[str, Placement]
"""Of units, by name."""


class PlanSettings(Protocol):
    """What is asked of a plan here; settings are read by their names."""

    @property
    def engine(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def overrides(self) -> Mapping[str, str | Placement]: ...
    @property
    def precision(self) -> str: ...
    @property
    def reduce_dtype(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`lacks`: what the engine does not have, in a few words. `sentence`: what to do about it."""

    lacks: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of a plan that an engine can only leave at `plain`. `refusal`: the sentence; {lacks} is key and value."""

    key: str
    plain: object
    # What means the same to this engine.
    as_plain: tuple[object, ...] = ()
    refusal: str = "engine = {engine!r} has no {lacks}: leave it out, or set engine = 'shardwise'"

    def refuse(self, plan: PlanSettings, *, engine: str) -> Refusal | None:
        value = getattr(plan, self.key)
        if value == self.plain or value in self.as_plain:
            return None
        lacks = f"{self.key} = {value!r}" if isinstance(value, str) else self.key
        return Refusal(lacks=lacks, sentence=self.refusal.format(engine=engine, lacks=lacks))


def everywhere(placement: Placement) -> bool:
    """Any placement."""
    return True


def lives_alike(placement: Placement) -> bool:
    """Parameters, gradients and optimizer state are all replicated, or all sharded."""
    return placement.params is placement.grads is placement.optim


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can run.

    can_place         whether it can run a unit of this placement
    settings          refused where a plan is made
    run_settings      a plan may be costed with them, but this engine does not run them
    combinations      what depends on several settings, or on the placements of several units
    untold            categories of memory whose buffers the engine does not tell of
    """

    name: str
    can_place: Callable[[Placement], bool] = everywhere
    settings: tuple[Setting, ...] = ()
    run_settings: tuple[Setting, ...] = ()
    combinations: Callable[[PlanSettings, Placements], Refusal | None] = lambda plan, placements: None
    untold: frozenset[str] = frozenset()

    def why_not(self, plan: PlanSettings, *, placements: Placements | None = None) -> Refusal | None:
        """Why it cannot run a plan; None if it can. `placements`: of a model's units; or those that the plan names."""
        placed = placements if placements is not None else _named(plan)
        for setting in (*self.settings, *self.run_settings):
            refusal = setting.refuse(plan, engine=self.name)
            if refusal is not None:
                return refusal
        for unit, placement in placed.items():
            if not self.can_place(placement):
                return self._no_placement(unit, placement)
        return self.combinations(plan, placed)

    def _no_placement(self, unit: str, placement: Placement) -> Refusal:
        *others, last = (name for name, row in STRATEGIES.items() if self.can_place(row))
        lacks = strategy_of(placement)
        return Refusal(
            lacks=lacks,
            sentence=f"engine = {self.name!r} has no {lacks} ({unit}): use {', '.join(others)} or {last}, or set "
            "engine = 'shardwise'",
        )


def _named(plan: PlanSettings) -> Placements:
    """The placements that a plan names, whatever the model's units are called."""
    root = {} if plan.strategy == AUTO else {"(root)": placement_of(plan.strategy)}
    return root | {
        pattern: placement_of(strategy) if isinstance(strategy, str) else strategy
        for pattern, strategy in plan.overrides.items()
    }


def _torch_combinations(plan: PlanSettings, placements: Placements) -> Refusal | None:
    replicated = [unit for unit, placement in placements.items() if placement.params is not SHARDED]
    sharded = [unit for unit, placement in placements.items() if placement.params is SHARDED]
    if replicated and sharded:
        lacks = "mix of replicated and sharded units"
        return Refusal(
            lacks=lacks,
            sentence=f"engine = 'torch' has no {lacks} ({replicated[0]} is {strategy_of(placements[replicated[0]])}, "
            f"{sharded[0]} is {strategy_of(placements[sharded[0]])}): give all units ddp or none, or set "
            "engine = 'shardwise'",
        )
    if plan.reduce_dtype != "fp32" and (replicated or plan.precision == "native"):
        where = "under ddp" if replicated else "under precision = 'native'"
        return Refusal(
            lacks=f"reduce_dtype = {plan.reduce_dtype!r} {where}",
            sentence=f"engine = 'torch' reduces gradients in their own dtype {where}, not in {plan.reduce_dtype}: "
            "leave reduce_dtype out, or set engine = 'shardwise'",
        )
    return None


_NO_OFFLOAD = "engine = 'torch' does not offload: set engine = 'shardwise'"

LIMITS: Mapping[str, EngineLimits] = MappingProxyType(
    {
        "shardwise": EngineLimits(name="shardwise"),
        "torch": EngineLimits(
            name="torch",
            can_place=lives_alike,
            settings=(
                Setting(
                    key="capture",
                    plain="auto",
                    as_plain=("off",),
                    refusal="capture = 'on' with engine = 'torch': only engine = 'shardwise' can capture a step",
                ),
                Setting(
                    key="collectives",
                    plain="backend",
                    refusal="{lacks} with engine = 'torch': torch's engine uses collectives = 'backend'",
                ),
                Setting(
                    key="dynamic",
                    plain=False,
                    refusal="dynamic = true with engine = 'torch': only engine = 'shardwise' can do that",
                ),
                Setting(key="owned", plain=()),
                Setting(key="offload_activations", plain=False, refusal=_NO_OFFLOAD),
                Setting(key="offload_states", plain=False, refusal=_NO_OFFLOAD),
            ),
            run_settings=(
                Setting(
                    key="recompute",
                    plain="none",
                    refusal="engine = 'torch' has no {lacks}: set recompute = 'none' and call "
                    "torch.utils.checkpoint.checkpoint(…, use_reentrant=False) in the model",
                ),
                Setting(key="recompute_overrides", plain=Patterns()),
                Setting(key="keep_fp32", plain=()),
                Setting(key="accumulate_reduced", plain=False),
            ),
            combinations=_torch_combinations,
            untold=frozenset({GATHERED, REDUCE}),
        ),
    }
)
"""The engines that a plan can name."""


def strategies_of(engine: str) -> tuple[str, ...]:
    """The strategies that an engine can run, in the table's order: the last one shards the most."""
    return tuple(name for name, placement in STRATEGIES.items() if LIMITS[engine].can_place(placement))


def check_settings(plan: PlanSettings) -> None:
    """Refuse a plan with a setting that its engine can do nothing with."""
    for setting in LIMITS[plan.engine].settings:
        refusal = setting.refuse(plan, engine=plan.engine)
        if refusal is not None:
            raise InvalidPlan(refusal.sentence)
