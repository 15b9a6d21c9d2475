"""A case: a model, a plan and a sequence of events, drawn from a seed. It is a value that can be printed and cut down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from drawn_plans import draw_plan
from drawn_plans import features as plan_features
from parts import FROZEN, PARTS, REFUSED, SQUARE, USES, Part

OPTIMIZERS = ("sgd", "adamw", "adamw fused", "adam")
# Event → the values of each of its settings; the first is the usual one.
EVENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "step": {
        "passes": (1, 1, 2, 3),
        "forwards": (1, 1, 1, 2),
        "backwards": (1, 1, 1, 2),
        "clip": ("none", "none", "norm", "value"),
        "set_to_none": (True, True, False),
    },
    "drop a forward": {"training": (True, False)},
    "drop gradients": {},
    "evaluate": {"training": (False, True)},
    "freeze": {"part": (), "how": FROZEN},
    "replan": {"plan": ()},
    "reload": {"plan": ()},
    "read": {"how": ("state_dict", "whole", "weight_stream", "full_state_dict")},
    "write": {"how": ("whole", "edit", "load_state_dict", "submodule", "in place")},
    "lr": {},
    "grad norms": {},
    "start average": {},
}
_MOST_EVENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.kind}({said})"

    def features(self) -> set[str]:
        """Return the event, and those of its settings that say something by themselves."""
        found = {f"event {self.kind}"}
        for name, values in EVENTS[self.kind].items():
            value = self.settings.get(name)
            if len(values) > 1 and name in self.settings and value != values[0]:
                found.add(f"{self.kind} {name} {value}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`double`: the model is float64, and results agree within a bound instead of bit for bit."""

    parts: tuple[Part, ...]
    plan: Mapping[str, Any]
    events: tuple[Event, ...]
    optimizer: str = "sgd"
    double: bool = False
    seed: int = 0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.optimizer}{', float64' if self.double else ''}, plan {dict(self.plan)}"]
        lines += [f"  parts.{number}: {part}" for number, part in enumerate(self.parts)]
        return "\n".join(lines + [f"  {number}. {event}" for number, event in enumerate(self.events)])

    def features(self) -> set[str]:
        found = {f"optimizer {self.optimizer}", *plan_features(dict(self.plan))}
        for described in (*self.parts, *self.events):
            found |= described.features()
        return found


def draw_case(seed: int, *, num_ranks: int) -> Case:
    """Return the case of a seed."""
    random = Random(f"{seed}/{num_ranks}")
    parts = _draw_parts(random)
    plan = draw_plan(random, num_parts=len(parts), num_ranks=num_ranks)
    events, current = [Event(kind="step", settings=_draw_step(random))], plan
    for _ in range(random.randint(1, _MOST_EVENTS)):
        events.append(_draw_event(random, plan=current, num_parts=len(parts), num_ranks=num_ranks))
        current = events[-1].settings.get("plan", current)
    events.append(Event(kind="step", settings={}))
    clips = any(event.settings.get("clip") == "norm" for event in events)
    return Case(
        parts=parts,
        plan=plan,
        events=tuple(events),
        optimizer=random.choice(OPTIMIZERS),
        # A norm and a sum of three depend on the order in which they are added up.
        double=clips or num_ranks > 2,
        seed=seed,
    )


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
        parts.append(Part(kind=kind, uses=uses, frozen=frozen, tied=tied))
    return tuple(parts)


def _draw_step(random: Random) -> dict[str, Any]:
    drawn = {name: random.choice(values) for name, values in EVENTS["step"].items()}
    return {name: value for name, value in drawn.items() if value != EVENTS["step"][name][0]}


def _draw_event(random: Random, *, plan: dict[str, Any], num_parts: int, num_ranks: int) -> Event:
    kind = "step" if random.random() < 0.4 else random.choice(list(EVENTS))
    if kind == "step":
        return Event(kind=kind, settings=_draw_step(random))
    settings = {name: random.choice(values) for name, values in EVENTS[kind].items() if values}
    if "part" in EVENTS[kind]:
        settings["part"] = random.randrange(num_parts)
    if "plan" in EVENTS[kind]:
        like = plan if kind == "replan" else None
        settings["plan"] = draw_plan(random, num_parts=num_parts, num_ranks=num_ranks, like=like)
    return Event(kind=kind, settings=settings)
