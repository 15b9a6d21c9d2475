"""The choices of all units as one value, and the plan that expresses them in a few patterns. No torch.

    Choice    of one unit: a row of the placement table, its recompute mode, and what of it is in host memory
    Dial      the choices of all units, and the settings of the job: mesh, prefetch, micro-batch, passes

The search changes dials; the planner's replay, the engine and TOML files use plans.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.search.micro_batches import across_on
from shardwise.program.spec import ROOT, ModelSpec, UnitSpec

_NUMBERED = re.compile(r"(.*?)(\d+)")


STATES, ACTIVATIONS = "states", "activations"
"""What a choice may keep in host memory."""


class Choice(NamedTuple):
    """A row of the placement table, a recompute mode, and what is in host memory."""

    row: str
    recompute: str
    host: frozenset[str] = frozenset()

    def on(self, row: str) -> "Choice":
        """Return the choice with another row; replicated states stay on the device."""
        host = self.host if STRATEGIES[row].grads.is_sharded else self.host - {STATES}
        return Choice(row, self.recompute, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """`choices`: of the units of `turned_units`. `root`: the row of the root unit."""

    root: str
    choices: tuple[Choice, ...]
    mesh: Mesh
    prefetch: int
    batch: int
    accumulate: int
    accumulate_reduced: bool = False

    def turned(self, positions: Collection[int], choice: Choice) -> "Dial":
        """Return the dial with another choice at some positions."""
        chosen = set(positions)
        return replace(self, choices=tuple(choice if at in chosen else c for at, c in enumerate(self.choices)))


def turned_units(spec: ModelSpec) -> tuple[str, ...]:
    """Return the units with a choice, in the order of calls; units that are never called come last."""
    every = (*spec.call_order, *(unit.name for unit in spec.units))
    return tuple(name for name in dict.fromkeys(every) if name != ROOT)


def equal_units(spec: ModelSpec) -> list[range]:
    """Return classes of consecutive equal units, as positions in `turned_units`."""
    units = {unit.name: unit for unit in spec.units}
    names = turned_units(spec)
    found = []
    for _, positions in groupby(range(len(names)), key=lambda at: _likeness(units[names[at]])):
        members = list(positions)
        found.append(range(members[0], members[-1] + 1))
    return found


def _likeness(unit: UnitSpec) -> tuple[object, ...]:
    return unit.class_name, tuple((param.shape, param.dtype, param.trainable) for param in unit.params)


def plan_of(dial: Dial, *, names: Sequence[str], base: Plan, may_cross: bool = True) -> Plan:
    """Return the plan that gives each unit its choice, with all other settings of `base`.

    may_cross   optimizer state may be sharded over both axes of a mesh
    """
    rows = {ROOT: dial.root} | {name: choice.row for name, choice in zip(names, dial.choices, strict=True)}
    ways = {name: choice.recompute for name, choice in zip(names, dial.choices, strict=True)}
    on_host = _on_host(dial, STATES, names=names) or base.offload_states
    row, way = _usual(rows.values()), _usual(ways.values()) if ways else "none"
    return replace(
        base,
        offload_states=on_host,
        offload_activations=_on_host(dial, ACTIVATIONS, names=names) or base.offload_activations,
        strategy=row,
        overrides=_patterns(rows, usual=row),
        recompute=way,
        recompute_overrides=_patterns(ways, usual=way),
        mesh=dial.mesh,
        across=across_on(dial.mesh, rows=rows.values(), base=base, may_cross=may_cross and not on_host),
        prefetch=dial.prefetch,
        micro_batch=dial.batch,
        accumulate=dial.accumulate,
        accumulate_reduced=dial.accumulate_reduced,
    )


def _on_host(dial: Dial, what: str, *, names: Sequence[str]) -> bool | tuple[str, ...]:
    """Return patterns for the units of which something is in host memory; for all, and then the root too, true."""
    picked = [name for name, choice in zip(names, dial.choices, strict=True) if what in choice.host]
    return bool(picked) if len(picked) in (0, len(names)) else tuple(name_patterns(picked, among=names))


def _usual(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _patterns(values: Mapping[str, str], *, usual: str) -> dict[str, str]:
    """Return pattern → value for all names whose value is not the usual one."""
    found: dict[str, str] = {}
    for value in dict.fromkeys(values.values()):
        if value != usual:
            named = [name for name, own in values.items() if own == value]
            found |= dict.fromkeys(name_patterns(named, among=values), value)
    return found


def name_patterns(names: Sequence[str], *, among: Iterable[str]) -> list[str]:
    """Return patterns that match only these names: `blocks.[0-8]` for blocks.0 to blocks.8."""
    by_prefix: dict[str, list[int]] = {}
    found = []
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None or numbered[2] != str(int(numbered[2])):
            found.append(name)
        else:
            by_prefix.setdefault(numbered[1], []).append(int(numbered[2]))
    for prefix, numbers in by_prefix.items():
        found += [prefix + digits for digits in _digit_patterns(sorted(numbers))]
    others = set(among) - set(names)
    wrong = any(fnmatchcase(other, pattern) for other in others for pattern in found)
    return list(names) if wrong else found


def _digit_patterns(numbers: Sequence[int]) -> Iterator[str]:
    """Yield patterns for increasing numbers, grouped by decade: 9, 10, 11, 12 → `9`, `1[0-2]`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and number // 10 == runs[-1][0] // 10:
            runs[-1].append(number)
        else:
            runs.append([number])
    # Consecutive complete decades are one pattern: 10 to 29 → `[1-2][0-9]`.
    for is_complete, group in groupby(runs, key=lambda run: len(run) == 10 and run[0] >= 10):
        if is_complete:
            yield from (f"{tens}[0-9]" for tens in _digit_patterns([run[0] // 10 for run in group]))
        else:
            for run in group:
                head = str(run[0])[:-1]
                yield str(run[0]) if len(run) == 1 else f"{head}[{run[0] % 10}-{run[-1] % 10}]"
