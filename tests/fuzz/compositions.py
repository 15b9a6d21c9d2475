"""A case: a model, a plan and a sequence of events, drawn from a seed. It is a value that can be printed and cut down."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any

from drawn_plans import FP8_UNITS, NARROW, draw_across, draw_plan, is_narrow
from drawn_plans import all_features as all_plan_features
from drawn_plans import features as plan_features
from parts import FROZEN, HOOKED, OTHER_MODEL, PARTS, REFUSED, SQUARE, USES, Part
from python_parts import ELSEWHERE, FACTORS, HOOKS, SETTINGS, WRITING

OPTIMIZERS = ("sgd", "adamw", "adamw fused", "adam")
# Rows and lengths of batches, by turns; ranks have different turns.
SIZES = {"usual": ((2, 3),), "rows": ((2, 3), (3, 3)), "lengths": ((2, 3), (2, 5)), "both": ((1, 3), (2, 4), (3, 2))}
# Event → the values of each of its settings; the first is the usual one.
EVENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "step": {
        "passes": (1, 1, 2, 3),
        "forwards": (1, 1, 1, 2),
        "backwards": (1, 1, 1, 2),
        "clip": ("none", "none", "norm", "value"),
        "set_to_none": (True, True, False),
        "by": ("forward", "forward", "method", "shardwise.step"),
        "retain": (False,) * 7 + (True,),
        "autocast": (False,) * 7 + (True,),
    },
    "drop a forward": {"training": (True, False)},
    "drop gradients": {},
    "evaluate": {"training": (False, True), "under": ("no_grad", "inference_mode")},
    "fail": {"part": (), "where": ("part", "head")},
    "set": {"part": (), "factor": FACTORS},
    "hook": {"part": (), "how": (*HOOKS, "remove")},
    "resize": {"how": tuple(SIZES)},
    "freeze": {"part": (), "how": FROZEN},
    "replan": {"plan": ()},
    "reload": {"plan": (), "how": ("full state", "checkpoint", "fewer ranks")},
    "read": {"how": ("state_dict", "whole", "weight_stream", "full_state_dict")},
    "write": {"how": ("whole", "edit", "load_state_dict", "submodule", "in place")},
    "together": {"how": ("turns", "teacher", "critic")},
    "join": {},
    "mean count": {},
    "extend": {},
    "lr": {},
    "grad norms": {},
    "start average": {},
}
# Public names of the package that no event calls, with the reason.
NOT_CALLED = {
    **dict.fromkeys(("Plan", "Mesh", "STRATEGIES", "Placement", "ShardwiseError"), "values of a plan"),
    **dict.fromkeys(("ModelSpec", "TensorSpec", "UnitSpec", "model_spec"), "descriptions; nothing is trained"),
    **dict.fromkeys(("from_pretrained", "save_pretrained", "lean_loss"), "for models of transformers"),
    **dict.fromkeys(("Task", "load_task"), "for `shardwise train`"),
    **dict.fromkeys(("DistributedSampler", "PadToMultiple"), "need no model"),
    **dict.fromkeys(("tape", "summary"), "views of what ran"),
    "predict": "nothing is trained",
    "smaller_plan": "nothing is trained",
    "protect": "restarts ranks: tests/dist/test_recovery.py",
}
_MOST_EVENTS = 6
# The share of cases whose units run as graphs, and the steps after which these are replayed.
_GRAPHS = 0.15
_STEPS_OF_GRAPHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.kind}({said})"

    def features(self) -> set[str]:
        """Return the event, and those of its settings that say something by themselves."""
        found = {f"event {self.kind}", *plan_features(self.settings.get("plan", {}))}
        for name, values in EVENTS[self.kind].items():
            value = self.settings.get(name)
            if len(values) > 1 and name in self.settings and value != values[0]:
                found.add(f"{self.kind} {name} {value}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`double`: the model is float64, and results agree within a bound instead of bit for bit. `late`: results of
    collectives arrive as late as they may (tests/dist/late.py). `graphs`: units run as graphs as soon as they can.
    `other_parts`, `other_plan`: those of a second model, which events use together with the first."""

    parts: tuple[Part, ...]
    plan: Mapping[str, Any]
    events: tuple[Event, ...]
    optimizer: str = "sgd"
    double: bool = False
    late: bool = False
    graphs: bool = False
    seed: int = 0
    other_parts: tuple[Part, ...] = (Part(kind="plain"),)
    other_plan: Mapping[str, Any] = field(default_factory=lambda: {"strategy": "fsdp"})

    def __str__(self) -> str:
        flags = {"float64": self.double, "late": self.late, "graphs": self.graphs}
        said = "".join(f", {name}" for name, is_set in flags.items() if is_set)
        lines = [f"seed {self.seed}, {self.optimizer}{said}, plan {dict(self.plan)}"]
        lines += [f"  parts.{number}: {part}" for number, part in enumerate(self.parts)]
        if any(event.kind == "together" for event in self.events):
            lines.append(
                f"  together with {', '.join(part.kind for part in self.other_parts)}, {dict(self.other_plan)}"
            )
        return "\n".join(lines + [f"  {number}. {event}" for number, event in enumerate(self.events)])

    def plans(self) -> list[Mapping[str, Any]]:
        """Return the plan, and those that events change to."""
        return [self.plan, *(event.settings["plan"] for event in self.events if "plan" in event.settings)]

    def features(self) -> set[str]:
        found = {f"optimizer {self.optimizer}", *plan_features(dict(self.plan))}
        found |= {name for name, is_set in (("late", self.late), ("graphs", self.graphs)) if is_set}
        for described in (*self.parts, *self.events):
            found |= described.features()
        return found


def all_pairs() -> set[tuple[str, str]]:
    """Return all pairs of features that one case can have."""
    names = {*all_plan_features(), "graphs", "late", "tied", *(f"optimizer {name}" for name in OPTIMIZERS)}
    names |= {f"part {kind}" for kind in PARTS} | {f"used {use}" for use in USES} | {f"frozen {how}" for how in FROZEN}
    names |= {"checkpointed", *(f"hooked {how}" for how in HOOKED)}
    for kind, settings in EVENTS.items():
        names.add(f"event {kind}")
        names |= {f"{kind} {name} {value}" for name, values in settings.items() for value in values[1:]}
        names -= {f"{kind} {name} {values[0]}" for name, values in settings.items() if values}
    return {pair for pair in combinations(sorted(names), 2) if not _exclude_each_other(*pair)}


def _exclude_each_other(one: str, other: str) -> bool:
    """Return whether no case can have both: a model has one optimizer, and keys that change what is computed stay."""
    kinds = {one.split()[0], other.split()[0]}
    return len(kinds) == 1 and kinds <= {"optimizer", "precision", "reduce_dtype", "compile"}


def draw_case(seed: int, *, num_ranks: int) -> Case:
    """Return the case of a seed."""
    random = Random(f"{seed}/{num_ranks}")
    parts = _draw_parts(random)
    # The sum of three numbers depends on the order, so on the strategy; in a narrow dtype no bound is small enough.
    may_be_narrow = num_ranks <= 2
    plan = draw_plan(random, num_parts=len(parts), num_ranks=num_ranks, may_be_narrow=may_be_narrow)
    if plan.get("precision") == "fp8":
        parts = (replace(parts[0], kind="wide", tied=False), *(replace(part, tied=False) for part in parts[1:]))
    narrow = is_narrow(plan)
    events, current = [Event(kind="step", settings=_draw_step(random, narrow=narrow))], plan
    for _ in range(random.randint(1, _MOST_EVENTS)):
        events.append(_draw_event(random, plan=current, parts=parts, num_ranks=num_ranks))
        current = events[-1].settings.get("plan", current)
    events.append(Event(kind="step", settings={}))
    clips = any(event.settings.get("clip") == "norm" for event in events)
    compiles = "compile" in plan or any("compile" in event.settings.get("plan", {}) for event in events)
    other_parts = tuple(Part(kind=random.choice(OTHER_MODEL)) for _ in range(random.randint(1, 2)))
    other_plan = draw_plan(random, num_parts=len(other_parts), num_ranks=num_ranks, may_be_narrow=False)
    other_plan.pop("compile", None)
    case = Case(
        other_parts=other_parts,
        other_plan=other_plan,
        parts=parts,
        plan=plan,
        events=tuple(events),
        optimizer=random.choice(OPTIMIZERS),
        # A norm and a sum of three depend on the order in which they are added up, as do the gradients of two
        # backwards if a checkpoint finds other state in the second; compiled code rounds differently.
        double=not narrow and (clips or compiles or num_ranks > 2 or _recomputes_twice(parts, events)),
        late=random.random() < 0.2,
        seed=seed,
    )
    if any(part.kind in ELSEWHERE for part in parts):
        case = _with_keys(case, without=("recompute", "recompute_overrides"))
    return with_graphs(case) if not narrow and random.random() < _GRAPHS else case


def with_graphs(case: Case) -> Case:
    """Return a case whose units run as graphs, with as many steps of each kind as it takes to replay one."""
    events = [event for event in case.events for _ in range(_STEPS_OF_GRAPHS if event.kind == "step" else 1)]
    # Parts are units, or their layers. What is offloaded does without graphs.
    # Not their layers where a checkpoint computes again from what its forward has written: torch then goes back through
    # those other values, and a graph of a layer through its own.
    reads_again = any(part.checkpointed and part.kind in WRITING for part in case.parts)
    units = "leaf" if case.seed % 4 == 0 and not reads_again else "parts"
    left_out = ("offload_activations", "update") if case.seed % 8 else ()
    # Where a parameter is used several times in each of several calls, gradients are added in another order.
    case = replace(case, graphs=True, double=True, events=tuple(events))
    return _with_keys(case, without=left_out, units=units)


def with_mesh(case: Case, mesh: Sequence[int]) -> Case:
    """Return a case all of whose plans have this mesh, with strategies across it where parameters are sharded."""
    random = Random(case.seed)

    def changed(plan: Mapping[str, Any]) -> dict[str, Any]:
        plan = {**plan, "mesh": list(mesh)}
        return {**plan, **draw_across(random, plan)}

    return _with_plans(case, changed)


def _recomputes_twice(parts: Sequence[Part], events: Sequence[Event]) -> bool:
    retains = any(event.settings.get("retain") for event in events)
    return retains and any(part.checkpointed for part in parts)


def _with_keys(case: Case, *, without: Sequence[str], **keys: Any) -> Case:
    """Return a case whose plans have these keys, and not those."""
    return _with_plans(case, lambda plan: {name: value for name, value in plan.items() if name not in without} | keys)


def _with_plans(case: Case, changed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Case:
    events = tuple(
        replace(event, settings={**event.settings, "plan": changed(event.settings["plan"])})
        if "plan" in event.settings
        else event
        for event in case.events
    )
    return replace(case, plan=changed(case.plan), events=events, other_plan=changed(case.other_plan))


def _draw_parts(random: Random) -> tuple[Part, ...]:
    parts: list[Part] = []
    for number in range(random.randint(1, 4)):
        kind = random.choice(list(PARTS))
        if kind in REFUSED and random.random() < 0.9:
            kind = "plain"
        tied = number > 0 and kind in SQUARE and parts[0].kind in SQUARE and random.random() < 0.5
        # What is refused must be so on all ranks.
        uses = random.choice(USES) if random.random() < 0.3 and kind not in REFUSED else "once"
        frozen = random.choice(FROZEN) if random.random() < 0.3 else "nothing"
        hooked = random.choice(HOOKED) if random.random() < 0.15 else "nothing"
        # A recomputation of what counts takes the other branch, which torch refuses; all ranks have to.
        alone = kind.startswith("counting") and uses == "sometimes"
        checkpointed = random.random() < 0.1 and kind not in REFUSED and not alone
        parts.append(Part(kind=kind, uses=uses, frozen=frozen, tied=tied, hooked=hooked, checkpointed=checkpointed))
    return tuple(parts)


def _draw_step(random: Random, *, narrow: bool) -> dict[str, Any]:
    drawn = {name: random.choice(values) for name, values in EVENTS["step"].items()}
    if drawn["by"] == "shardwise.step":
        # It is a whole step: it clips by the norm only, has one backward per pass, and sets gradients to None.
        drawn = {"passes": drawn["passes"], "clip": "norm" if drawn["clip"] == "norm" else "none", "by": drawn["by"]}
    if narrow and drawn["clip"] == "norm":
        # The norm's last bits depend on the strategy, and so would those of the weights.
        drawn["clip"] = "none"
    if narrow:
        drawn |= {"autocast": False, "retain": False}
    if drawn.get("retain"):
        # Each backward gives the same, and twice that is exact.
        drawn |= {"passes": 1, "forwards": 1, "backwards": 1}
    return {name: value for name, value in drawn.items() if value != EVENTS["step"][name][0]}


def _draw_event(random: Random, *, plan: dict[str, Any], parts: Sequence[Part], num_ranks: int) -> Event:
    kind = "step" if random.random() < 0.4 else random.choice(list(EVENTS))
    if kind == "extend" and ("owned" in plan or plan.get("units") == "leaf") and random.random() < 0.8:
        kind = "mean count"
    narrow = is_narrow(plan)
    if kind == "step":
        return Event(kind=kind, settings=_draw_step(random, narrow=narrow))
    settings = {name: random.choice(values) for name, values in EVENTS[kind].items() if values}
    if settings.get("how") == "edit" and "owned" in plan:
        # The loop over slices would write some of them before one with an owner is refused.
        settings["how"] = "whole"
    if "part" in EVENTS[kind]:
        have_setting = [number for number, part in enumerate(parts) if part.kind in SETTINGS]
        settings["part"] = random.choice((kind == "set" and have_setting) or range(len(parts)))
        if kind == "fail" and parts[settings["part"]].uses in ("never", "sometimes"):
            # An error that not all ranks raise ends a job.
            settings["where"] = "head"
    if "plan" in EVENTS[kind]:
        like = plan if kind == "replan" else None
        drawn = draw_plan(random, num_parts=len(parts), num_ranks=num_ranks, like=like, may_be_narrow=False)
        # What is computed stays as it was, so that the oracle of the case stays the same.
        if narrow:
            drawn.pop("compile", None)
        if plan.get("precision") == "fp8" and drawn.get("units") not in ("leaf", "min-params:20"):
            drawn["units"] = FP8_UNITS
        settings["plan"] = {**drawn, **{name: plan[name] for name in NARROW if name in plan}}
    return Event(kind=kind, settings=settings)
