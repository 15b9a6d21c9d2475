"""The limits of each engine: which placements, settings and functions it has, and the sentence that refuses the rest.

    Plan          refuses, when it is made, a setting that its engine cannot use (`check_settings`)
    prepare       refuses a plan that the engine cannot run (`EngineLimits.why_not`)
    functions     an engine refuses a call that it does not have (`EngineLimits.check_call`)
    search, CLI   try only strategies and plans that the engine can run (`strategies_of`, `why_not`)
    bench         names what is missing in a few words (`Refusal.lacks`)

A plan that prepare refuses can still be costed: a model may recompute by itself, for example.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.categories import GATHERED, REDUCE
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import ACROSS, AUTO, STRATEGIES, Placement, placement_of, strategy_of

Placements = Mapping[str, Placement]
"""Of units, by name."""


class PlanSettings(Protocol):
    """The part of a plan that limits depend on; other settings are read by their names."""

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
    @property
    def update(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`lacks` names what the engine does not have, in a few words; `sentence` also says what to do about it."""

    lacks: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of a plan that an engine can only leave at `plain`. `refusal`: the sentence; {lacks} is key and value."""

    key: str
    plain: object
    # Other values that have the same meaning under this engine.
    as_plain: tuple[object, ...] = ()
    refusal: str = "engine = {engine!r} has no {lacks}: leave it out, or set engine = 'shardwise'"

    def refuse(self, plan: PlanSettings, *, engine: str) -> Refusal | None:
        value = getattr(plan, self.key)
        if value == self.plain or value in self.as_plain:
            return None
        lacks = f"{self.key} = {value!r}" if isinstance(value, str) else self.key
        return Refusal(lacks=lacks, sentence=self.refusal.format(engine=engine, lacks=lacks))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimit:
    """A function that an engine does not have, or one argument of it.

    argument   the argument that the engine does not take; "" where it does not have the function at all
    under      whether the limit holds under a plan and its placements
    """

    function: str
    argument: str = ""
    sentence: str
    under: Callable[[PlanSettings, Placements], bool] = lambda plan, placements: True


def lives_alike(placement: Placement) -> bool:
    """Return whether parameters, gradients and optimizer state are all replicated, or all sharded."""
    return placement.params is placement.grads is placement.optim


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits of one engine.

    can_place         whether it can run a unit of this placement
    settings          settings that are refused when a plan is made
    run_settings      settings that a plan may be costed with, but that this engine does not run
    combinations      limits that depend on several settings, or on the placements of several units
    calls             functions of the package, and arguments of functions, that it does not have
    untold            categories of memory whose buffers the engine does not report
    has_graphs        it can run units as CUDA graphs
    has_lean_loss     the planner takes models of the catalogue with the lean loss (models/own/lean_loss.py)
    cuts_reduces      sharded gradients of a large unit are reduced in pieces (plan.piece_bytes)
    """

    name: str
    can_place: Callable[[Placement], bool] = lambda placement: True
    settings: tuple[Setting, ...] = ()
    run_settings: tuple[Setting, ...] = ()
    combinations: Callable[[PlanSettings, Placements], Refusal | None] = lambda plan, placements: None
    calls: tuple[CallLimit, ...] = ()
    untold: frozenset[str] = frozenset()
    has_graphs: bool = True
    has_lean_loss: bool = True
    cuts_reduces: bool = True

    def why_not(self, plan: PlanSettings, *, placements: Placements | None = None) -> Refusal | None:
        """Return why it cannot run a plan; None if it can.

        `placements` are those of a model's units (default: those that the plan names).
        """
        refusals = (setting.refuse(plan, engine=self.name) for setting in self.run_settings)
        refusal = next((one for one in refusals if one is not None), None)
        return refusal or self.why_not_planned(plan, placements=placements)

    def why_not_planned(self, plan: PlanSettings, *, placements: Placements | None = None) -> Refusal | None:
        """Return why the planner cannot cost a plan for this engine; None if it can.

        That covers what a model or a loop does by itself on the engine, such as recomputing.
        """
        placed = placements if placements is not None else _named(plan)
        for setting in self.settings:
            refusal = setting.refuse(plan, engine=self.name)
            if refusal is not None:
                return refusal
        for unit, placement in placed.items():
            if not self.can_place(placement):
                return self._no_placement(unit, placement)
        return self.combinations(plan, placed)

    def has(self, setting: str) -> bool:
        """Return whether a plan may change this setting under this engine."""
        return all(one.key != setting for one in self.settings)

    def runs(self, setting: str) -> bool:
        """Return whether it does itself what this setting says, instead of leaving it to the model or the loop."""
        return all(one.key != setting for one in (*self.settings, *self.run_settings))

    def why_not_call(
        self,
        function: str,
        plan: PlanSettings,
        *,
        arguments: Collection[str] = (),
        placements: Placements | None = None,
    ) -> Refusal | None:
        """Return why it does not have a function, or one of these arguments of it, under a plan; None if it does."""
        placed = placements if placements is not None else _named(plan)
        for limit in self.calls:
            is_asked = limit.function == function and (not limit.argument or limit.argument in arguments)
            if is_asked and limit.under(plan, placed):
                return Refusal(lacks=limit.argument or limit.function, sentence=limit.sentence)
        return None

    def check_call(self, function: str, plan: PlanSettings, *, arguments: Collection[str] = ()) -> None:
        """Raise InvalidPlan for a function, or an argument, that it does not have under a plan."""
        refusal = self.why_not_call(function, plan, arguments=arguments)
        if refusal is not None:
            raise InvalidPlan(refusal.sentence)

    def _no_placement(self, unit: str, placement: Placement) -> Refusal:
        *others, last = (name for name, row in STRATEGIES.items() if self.can_place(row))
        lacks = strategy_of(placement)
        return Refusal(
            lacks=lacks,
            sentence=f"engine = {self.name!r} has no {lacks} ({unit}): use {', '.join(others)} or {last}, or set "
            "engine = 'shardwise'",
        )


def _named(plan: PlanSettings) -> Placements:
    """Return the placements that a plan names, whatever the model's units are called."""
    root = {} if plan.strategy == AUTO else {"(root)": placement_of(plan.strategy)}
    return root | {
        pattern: placement_of(strategy) if isinstance(strategy, str) else strategy
        for pattern, strategy in plan.overrides.items()
    }


def _torch_combinations(plan: PlanSettings, placements: Placements) -> Refusal | None:
    if plan.precision == "fp8":
        return Refusal(
            lacks="precision = 'fp8'",
            sentence="engine = 'torch' has no precision = 'fp8': set precision = 'bf16', or engine = 'shardwise'",
        )
    replicated = [unit for unit, placement in placements.items() if not placement.params.is_sharded]
    sharded = [unit for unit, placement in placements.items() if placement.params.is_sharded]
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
_TORCH_CALLS = (
    CallLimit(
        function="prepare",
        argument="collectives",
        sentence="engine = 'torch' has collectives of its own: leave collectives out of prepare",
    ),
    CallLimit(
        function="prepare",
        argument="weights",
        sentence="engine = 'torch' takes no weights: load them with shardwise.load_full_state_dict",
    ),
    CallLimit(
        function="prepare",
        argument="optimizers",
        sentence="engine = 'torch' takes one optimizer; prepare with None, and make them afterwards",
    ),
    CallLimit(
        function="replan",
        sentence="shardwise.replan needs a model of shardwise.prepare with engine = 'shardwise': torch's engines are "
        "made for one plan; save a checkpoint, and resume under the other",
    ),
    CallLimit(
        function="join",
        sentence="shardwise.join needs engine = 'shardwise'; on torch's, DistributedDataParallel has a join() of its "
        "own",
    ),
    CallLimit(
        function="whole",
        sentence="shardwise.whole needs engine = 'shardwise': fully_shard's parameters are slices",
        under=lambda plan, placements: any(placement.params.is_sharded for placement in placements.values()),
    ),
    CallLimit(
        function="tape", sentence="shardwise.tape needs engine = 'shardwise': torch's engines record no operations"
    ),
    CallLimit(function="from_pretrained", sentence="plan.engine = 'torch': from_pretrained runs engine = 'shardwise'"),
    CallLimit(
        function="save_pretrained",
        sentence="save_pretrained needs engine = 'shardwise': save shardwise.full_state_dict(model) instead",
    ),
    CallLimit(function="integrations", sentence="plan.engine = 'torch': integrations run engine = 'shardwise'"),
    CallLimit(
        function="muon",
        sentence="fully_shard gives Muon slices of matrices",
        under=lambda plan, placements: (
            plan.strategy == AUTO or any(placement.optim.is_sharded for placement in placements.values())
        ),
    ),
)

LIMITS: Mapping[str, EngineLimits] = MappingProxyType(
    {
        "shardwise": EngineLimits(
            name="shardwise",
        ),
        "torch": EngineLimits(
            name="torch",
            can_place=lives_alike,
            settings=(
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
                Setting(key="across", plain=ACROSS[0]),
                Setting(
                    key="update",
                    plain="step",
                    as_plain=("auto",),
                    refusal="update = 'backward' with engine = 'torch': only engine = 'shardwise' can do that",
                ),
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
                Setting(key="tile", plain=Patterns()),
                Setting(key="keep_fp32", plain=()),
                Setting(key="uncaptured", plain=()),
                Setting(key="accumulate_reduced", plain=False),
            ),
            combinations=_torch_combinations,
            calls=_TORCH_CALLS,
            untold=frozenset({GATHERED, REDUCE}),
            has_graphs=False,
            has_lean_loss=False,
            cuts_reduces=False,
        ),
    }
)
"""The engines that a plan can name."""


def strategies_of(engine: str) -> tuple[str, ...]:
    """Return the strategies that an engine can run, in the table's order: the last one shards the most."""
    return tuple(name for name, placement in STRATEGIES.items() if LIMITS[engine].can_place(placement))


def check_settings(plan: PlanSettings) -> None:
    """Raise InvalidPlan for a setting that the plan's engine cannot use."""
    for setting in LIMITS[plan.engine].settings:
        refusal = setting.refuse(plan, engine=plan.engine)
        if refusal is not None:
            raise InvalidPlan(refusal.sentence)
