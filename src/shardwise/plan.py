"""The plan: everything that decides how a model is trained on many ranks, as one frozen value.

The planner costs it, the engine runs it, and it is saved as TOML so that both talk of the same thing.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from reprlib import repr as _show
from typing import Any, Self

from shardwise.atomic import atomic_write
from shardwise.errors import InvalidPlan, ShardwiseError, UnknownName
from shardwise.mesh import Mesh
from shardwise.placement import STRATEGIES, Placement, Where, placement_of, strategy_of
from shardwise.policy import UnitPolicy

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "strategy": tuple(STRATEGIES),
    "precision": ("fp32", "bf16", "fp16", "native"),
    "reduce_dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "engine": ("shardwise", "torch"),
    "collectives": ("backend", "ring"),
}
_LEAST: Mapping[str, int] = {
    "micro_batch": 1,
    "accumulate": 1,
    "prefetch": 0,
    "reduces_in_flight": 1,
    "bucket_bytes": 1,
}
_OPTIONAL = ("micro_batch",)
# What TOML's integers are sure to hold.
_MOST = 2**63 - 1


class Overrides(Mapping[str, str]):
    """Pattern → strategy; ordered, frozen, hashable. A placement is kept by the name of its row."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str | Placement] | None = None) -> None:
        self._items = tuple((pattern, _strategy(pattern, value)) for pattern, value in (items or {}).items())

    def __getitem__(self, pattern: str) -> str:
        return dict(self._items)[pattern]

    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        # Unlike other mappings, in order: a later pattern wins over an earlier one.
        return isinstance(other, Overrides) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


def _strategy(pattern: object, value: object) -> str:
    if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
        raise InvalidPlan(f"overrides: {_show(pattern)} is not a pattern for unit names")
    if isinstance(value, Placement):
        return strategy_of(value)
    if not isinstance(value, str) or value not in STRATEGIES:
        raise InvalidPlan(_not_among(f"overrides.{pattern}", value, STRATEGIES) + ", or a placement")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained on many ranks.

    strategy           the placement of every unit that no override names
    overrides          unit-name pattern (`blocks.0`, `blocks.*`) → strategy or Placement; a later one wins
    units              how the model is cut into units (policy.py)
    mesh               replicate × shard; None: all ranks on the shard axis
    micro_batch        samples per rank and pass; None: the caller's loop decides
    accumulate         passes per optimizer step
    precision          what units compute in; `native` leaves the module's own dtypes alone
    reduce_dtype       what gradients are summed in
    recompute          activations that backward computes again
    prefetch           units gathered ahead of the one that computes
    reduces_in_flight  gradient reductions that may be under way at once
    bucket_bytes       gradients that are reduced together, at least, where grads are replicated
    capture            the whole step as one CUDA graph
    engine             ours, or the same plan on torch's own DDP and fully_shard
    collectives        the backend's, or our ring on sends and receives
    """

    strategy: str = "fsdp"
    overrides: Mapping[str, str | Placement] = field(default_factory=Overrides)
    units: str = "auto"
    mesh: Mesh | None = None
    micro_batch: int | None = None
    accumulate: int = 1
    precision: str = "fp32"
    reduce_dtype: str = "fp32"
    recompute: str = "none"
    prefetch: int = 1
    reduces_in_flight: int = 1
    bucket_bytes: int = 25 * 2**20
    capture: bool = False
    engine: str = "shardwise"
    collectives: str = "backend"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidPlan(_not_among(name, value, allowed))
        for name, least in _LEAST.items():
            _check_count(name, getattr(self, name), least=least, optional=name in _OPTIONAL)
        if not isinstance(self.capture, bool):
            raise InvalidPlan(f"capture = {_show(self.capture)}: must be true or false")
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise InvalidPlan(f"mesh = {_show(self.mesh)}: must be a Mesh (replicate and shard)")
        if not isinstance(self.overrides, Mapping):
            raise InvalidPlan(f"overrides = {_show(self.overrides)}: must map unit-name patterns to strategies")
        # One spelling for one plan, so that equal plans are equal values.
        object.__setattr__(self, "units", str(UnitPolicy.parse(self.units)))
        object.__setattr__(self, "overrides", Overrides(self.overrides))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.engine == "torch" and self.capture:
            raise InvalidPlan("capture = true with engine = 'torch': only engine = 'shardwise' can capture a step")
        if self.engine == "torch" and self.collectives == "ring":
            raise InvalidPlan("collectives = 'ring' with engine = 'torch': torch's engine uses collectives = 'backend'")

    def placements(self, unit_names: Iterable[str]) -> dict[str, Placement]:
        """The placement of each unit; every override must name at least one of them."""
        names = list(unit_names)
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InvalidPlan(
                    f"overrides.{pattern} matches no unit; the units are {_some(names)} "
                    f"(units = {self.units!r}; 'auto + MODULE' makes a module a unit)"
                )
        return {name: self._placement(name) for name in names}

    def _placement(self, unit_name: str) -> Placement:
        matching = [value for pattern, value in self.overrides.items() if fnmatchcase(unit_name, pattern)]
        chosen = matching[-1] if matching else self.strategy
        return chosen if isinstance(chosen, Placement) else placement_of(chosen)

    def to_dict(self) -> dict[str, Any]:
        """The plan in TOML's own types, every key written out; what is None is left out."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["overrides"] = dict(self.overrides)
        if self.mesh is not None:
            data["mesh"] = {"replicate": self.mesh.replicate, "shard": self.mesh.shard}
        # Tables go last: a key after a table's header would belong to the table.
        scalars_first = sorted(data.items(), key=lambda item: isinstance(item[1], dict))
        return {name: value for name, value in scalars_first if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The plan that `to_dict` gave; anything else is refused by key and value."""
        known = [item.name for item in fields(cls)]
        for name in data:
            if name not in known:
                raise InvalidPlan(str(UnknownName.of("key", name, known=known)))
        values = dict(data)
        if "mesh" in values:
            mesh = _table("mesh", values["mesh"], allowed=("replicate", "shard"))
            values["mesh"] = Mesh(**mesh)
        if "overrides" in values:
            overrides = _table("overrides", values["overrides"])
            values["overrides"] = {p: _override(p, value) for p, value in overrides.items()}
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as TOML; the file appears whole or not at all."""
        import tomli_w

        try:
            with atomic_write(path) as file:
                tomli_w.dump(self.to_dict(), file)
        except OSError as error:
            raise InvalidPlan(f"{path}: cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from TOML; a mistake is one line that names the file, the key and what is allowed."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidPlan(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InvalidPlan(f"{path}: is not text in UTF-8 (byte {error.start})") from error
        except ValueError as error:
            raise InvalidPlan(f"{path}: is not TOML: {' '.join(str(error).split())}") from error
        except RecursionError as error:
            raise InvalidPlan(f"{path}: is not a plan: nested too deeply") from error
        try:
            return cls.from_dict(data)
        except ShardwiseError as error:
            raise InvalidPlan(f"{path}: {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")


def _not_among(key: str, value: object, allowed: Iterable[str]) -> str:
    return f"{key} = {_show(value)}: must be one of {', '.join(allowed)}"


def _check_count(name: str, value: object, *, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise InvalidPlan(f"{name} = {_show(value)}: must be a whole number of at least {least}")


def _table(name: str, value: object, *, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidPlan(f"{name} = {_show(value)}: must be a table")
    for key in value:
        if allowed is not None and key not in allowed:
            raise InvalidPlan(f"{name}.{_plain(key)}: unknown key; allowed: {', '.join(allowed)}")
    return value


def _plain(key: str) -> str:
    return key if key.isprintable() else _show(key)


def _override(pattern: str, value: object) -> str | Placement:
    """A strategy's name as it is; a table of params, grads, optim, reshard_after_forward as a placement."""
    if not isinstance(value, dict):
        return value  # type: ignore[return-value]  # Plan says what else is wrong with it
    key = f"overrides.{_plain(pattern)}"
    states = ("params", "grads", "optim")
    table = _table(key, value, allowed=(*states, "reshard_after_forward"))
    where = {where.value: where for where in Where}
    for state in states:
        if state not in table:
            raise InvalidPlan(f"{key}.{state} is missing: must be one of {', '.join(where)}")
        if not isinstance(table[state], str) or table[state] not in where:
            raise InvalidPlan(_not_among(f"{key}.{state}", table[state], where))
    try:
        return Placement(
            **{state: where[table[state]] for state in states},
            reshard_after_forward=table.get("reshard_after_forward", False),
        )
    except InvalidPlan as error:
        raise InvalidPlan(f"{key}: {error}") from error
