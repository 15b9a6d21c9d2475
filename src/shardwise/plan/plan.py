"""The plan: everything that decides how a model is trained on many ranks, as one frozen value.

The planner costs it, the engine runs it, and it is saved as TOML so that both talk of the same thing.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from reprlib import repr as _show
from typing import Any, Self

from shardwise.errors import InvalidPlan, ShardwiseError, UnknownName
from shardwise.files.atomic import atomic_write
from shardwise.files.toml_file import read_toml
from shardwise.plan.limits import LIMITS, check_settings
from shardwise.plan.mesh import Mesh
from shardwise.plan.patterns import Patterns, check_pattern, unmatched
from shardwise.plan.placement import AUTO, STRATEGIES, Placement, placement_of, resolve_strategy, strategy_of
from shardwise.plan.plan_form import check_count, not_among, override_of, some, table_of
from shardwise.plan.policy import UnitPolicy
from shardwise.vocabulary.auto_solver import auto_solver

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "strategy": (*STRATEGIES, AUTO),
    "precision": ("fp32", "bf16", "fp16", "native"),
    "reduce_dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "engine": tuple(LIMITS),
    "collectives": ("backend", "ring"),
    "compile": ("none", "inductor", "aot_eager", AUTO),
    "capture": ("auto", "on", "off"),
}
_LEAST: Mapping[str, int] = {
    "micro_batch": 1,
    "accumulate": 1,
    "prefetch": 0,
    "reduces_in_flight": 1,
    "bucket_bytes": 1,
}
_OPTIONAL = ("micro_batch",)
_OWNED_MOVE = "parameters that one rank owns get new memory in each update"
_SWITCHES = ("accumulate_reduced", "offload_activations", "offload_states", "dynamic")


def _strategies(items: object, *, replicate: int) -> Patterns:
    """Pattern → strategy; a placement is kept by the name of its row."""
    given = {check_pattern(pattern, key="overrides"): value for pattern, value in _mapping("overrides", items)}
    return Patterns({pattern: _strategy(pattern, value, replicate=replicate) for pattern, value in given.items()})


def _strategy(pattern: str, value: object, *, replicate: int) -> str:
    if isinstance(value, Placement):
        return strategy_of(value)
    name = resolve_strategy(value, replicate=replicate) if isinstance(value, str) else ""
    if name not in STRATEGIES:
        raise InvalidPlan(not_among(f"overrides.{pattern}", value, STRATEGIES) + ", or a placement")
    return name


def _recomputes(items: object) -> Patterns:
    """Pattern → recompute."""
    checked = {}
    for pattern, value in _mapping("recompute_overrides", items):
        key = f"recompute_overrides.{check_pattern(pattern, key='recompute_overrides')}"
        if not isinstance(value, str) or value not in _CHOICES["recompute"]:
            raise InvalidPlan(not_among(key, value, _CHOICES["recompute"]))
        checked[pattern] = value
    return Patterns(checked)


def _mapping(key: str, items: object) -> Iterable[tuple[str, object]]:
    if not isinstance(items, Mapping):
        raise InvalidPlan(f"{key} = {_show(items)}: must map unit-name patterns to values")
    return items.items()


def _patterns(key: str, value: object, *, of: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise InvalidPlan(f"{key} = {_show(value)}: must be a list of {of}-name patterns")
    return tuple(check_pattern(pattern, key=key) for pattern in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained on many ranks.

    strategy           the placement of every unit that no override names. Other libraries' names are taken too, and
                       replaced: no_shard → ddp; zero3, full_shard, and with a mesh hybrid_shard → fsdp. `auto`: the
                       planner chooses a placement and a recompute for each unit, before a run (`Plan.auto`,
                       `shardwise train`)
    overrides          unit-name pattern (`blocks.0`, `blocks.*`) → strategy or Placement; a later one wins
    units              how the model is cut into units (policy.py)
    mesh               replicate × shard; None: all ranks on the shard axis
    micro_batch        samples per rank per pass; None: the caller's loop decides
    accumulate         passes per optimizer step
    accumulate_reduced each of those passes reduces its gradients: less memory, more communication
    precision          what units compute in; `native` leaves the module's own dtypes alone
    keep_fp32          module-name patterns (`*.norm*`, `head`): what these hold computes in fp32 all the same
    reduce_dtype       what gradients are summed in
    recompute          activations of a unit that backward computes again: none; all (full); all but the outputs of
                       matrix products and attention (selective). The root's are kept
    recompute_overrides  unit-name pattern → recompute; a later one wins
    offload_activations  what backward needs of a unit waits in host memory
    offload_states     sharded optimizer state (and sharded parameters) live in host memory and are updated there
    prefetch           units gathered ahead of the one that computes
    reduces_in_flight  gradient reductions that may be under way at once
    bucket_bytes       gradients that are reduced together, at least, where grads are replicated
    owned              parameter-name patterns (`blocks.*.weight`): where optimizer state is sharded, that of each of
                       these lives whole on one rank, which steps the whole parameter. `prepare` adds those whose
                       optimizer needs it
    dynamic            units are called in another order in every step, or on every rank: the ranks agree on each
                       gather, which costs time. Units that are only skipped now and then do not need it
    compile            torch.compile of each unit but the root, by this backend; auto: where the planner chooses the
                       plan, it may choose inductor (results then differ by rounding); other plans do not compile
    capture            steps as CUDA graphs (shardwise.capture, train): where it is safe and pays (auto), always or not
                       at all (on, off; in TOML also true, false)
    engine             ours, or the same plan on torch's own DDP and fully_shard
    collectives        the backend's, or our ring on sends and receives
    """

    strategy: str = "fsdp"
    overrides: Mapping[str, str | Placement] = field(default_factory=Patterns)
    units: str = "auto"
    mesh: Mesh | None = None
    micro_batch: int | None = None
    accumulate: int = 1
    accumulate_reduced: bool = False
    precision: str = "fp32"
    keep_fp32: tuple[str, ...] = ()
    reduce_dtype: str = "fp32"
    recompute: str = "none"
    recompute_overrides: Mapping[str, str] = field(default_factory=Patterns)
    offload_activations: bool = False
    offload_states: bool = False
    prefetch: int = 1
    reduces_in_flight: int = 1
    bucket_bytes: int = 25 * 2**20
    owned: tuple[str, ...] = ()
    dynamic: bool = False
    compile: str = "none"
    capture: str | bool = "auto"
    engine: str = "shardwise"
    collectives: str = "backend"

    def __post_init__(self) -> None:
        if isinstance(self.capture, bool):
            object.__setattr__(self, "capture", "on" if self.capture else "off")
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise InvalidPlan(f"mesh = {_show(self.mesh)}: must be a Mesh (replicate and shard)")
        replicate = self.mesh.replicate if self.mesh is not None else 1
        if isinstance(self.strategy, str):
            object.__setattr__(self, "strategy", resolve_strategy(self.strategy, replicate=replicate))
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidPlan(not_among(name, value, allowed))
        for name, least in _LEAST.items():
            check_count(name, getattr(self, name), least=least, optional=name in _OPTIONAL)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidPlan(f"{name} = {_show(getattr(self, name))}: must be true or false")
        # One spelling for one plan, so that equal plans are equal values.
        object.__setattr__(self, "units", str(UnitPolicy.parse(self.units)))
        object.__setattr__(self, "overrides", _strategies(self.overrides, replicate=replicate))
        object.__setattr__(self, "recompute_overrides", _recomputes(self.recompute_overrides))
        object.__setattr__(self, "keep_fp32", _patterns("keep_fp32", self.keep_fp32, of="module"))
        object.__setattr__(self, "owned", _patterns("owned", self.owned, of="parameter"))
        self._check_combination()

    def _check_combination(self) -> None:
        check_settings(self)
        hindrance = self._capture_hindrance()
        if self.capture == "on" and hindrance:
            raise InvalidPlan(
                f"capture = 'on' with {hindrance}: such a step waits for the device; set capture = 'auto' or 'off'"
            )
        if self.is_auto and (self.overrides or self.recompute_overrides):
            raise InvalidPlan("strategy = 'auto' chooses for each unit: leave overrides and recompute_overrides out")
        if self.owned and self.offload_states:
            raise InvalidPlan(
                "owned with offload_states = true: what one rank steps whole is stepped on the device, with its state; "
                "leave one of them out"
            )
        if self.owned and self.captures:
            raise InvalidPlan(f"owned with capture = 'on': {_OWNED_MOVE}; set capture = 'auto' or 'off'")
        if self.precision == "native" and self.keep_fp32:
            raise InvalidPlan("keep_fp32 with precision = 'native': native leaves every module's dtypes alone")

    @property
    def is_auto(self) -> bool:
        """Whether placements are still to be chosen."""
        return self.strategy == AUTO

    @property
    def is_fp16(self) -> bool:
        return self.precision == "fp16"

    @property
    def compiler(self) -> str:
        """The backend that compiles units, or none. What `auto` leaves open is not compiled before it is chosen."""
        return "none" if self.compile == AUTO else self.compile

    def compiles(self, unit_name: str) -> bool:
        """Whether a unit is compiled: not the root, in which everything else happens, nor what recomputes selectively.

        torch.compile compiles nothing under the dispatch mode that this takes; but code that it has compiled for
        another unit of the class would run there, and keep what that one keeps.
        """
        return self.compiler != "none" and unit_name != "(root)" and self.recompute_of(unit_name) != "selective"

    @property
    def captures(self) -> bool:
        """Whether steps are sure to be CUDA graphs. Whether they are under `auto` is only known when they run."""
        return self.capture == "on"

    def _capture_hindrance(self) -> str:
        for name, set_so in (
            ("dynamic = true", self.dynamic),
            ("offload_states = true", self.offload_states),
            ("precision = 'fp16'", self.is_fp16),
        ):
            if set_so:
                return name
        return ""

    def why_not_captured(self) -> str:
        """Why `auto` captures no step of this plan, whatever the model; "" if it may."""
        hindrance = self._capture_hindrance()
        if hindrance:
            return f"with {hindrance} a step waits for the device"
        if self.offload_activations:
            return "offload_activations = true"
        if self.owned:
            return _OWNED_MOVE
        return "" if self.collectives == "backend" else f"collectives = {self.collectives!r}"

    def placements(self, unit_names: Iterable[str]) -> dict[str, Placement]:
        """The placement of each unit; every override must name at least one of them."""
        names = list(unit_names)
        for key in ("overrides", "recompute_overrides"):
            for pattern in unmatched(getattr(self, key), names):
                raise InvalidPlan(
                    f"{key}.{pattern} matches no unit; the units are {some(names)} "
                    f"(units = {self.units!r}; 'auto + MODULE' makes a module a unit)"
                )
        return {name: self.placement(name) for name in names}

    def placement(self, unit_name: str) -> Placement:
        """The placement of one unit."""
        assert isinstance(self.overrides, Patterns)
        if self.is_auto:
            raise InvalidPlan(
                "strategy = 'auto': the plan is not chosen yet; shardwise.Plan.auto(task, ...) chooses it, and so do "
                "`shardwise train` and `shardwise plan --strategy auto --save PLAN.toml`"
            )
        return placement_of(self.overrides.find(unit_name, default=self.strategy))

    def recompute_of(self, unit_name: str) -> str:
        """What backward computes again of a unit; nothing of the root, which would be the whole model."""
        assert isinstance(self.recompute_overrides, Patterns)
        return "none" if unit_name == "(root)" else self.recompute_overrides.find(unit_name, default=self.recompute)

    def keeps_fp32(self, path: str) -> bool:
        """Whether a parameter or module of that path lies in a module that `keep_fp32` names."""
        if not self.keep_fp32:
            return False
        parts = path.split(".")
        above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return any(fnmatchcase(module, pattern) for pattern in self.keep_fp32 for module in above)

    def owns(self, parameter: str) -> bool:
        """Whether one rank is to own the optimizer state of the parameter of that name."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.owned)

    @classmethod
    def auto(
        cls,
        model: Any,
        *,
        plan: "Plan | None" = None,
        cluster: Any = None,
        budget_bytes: int | None = None,
        global_batch: int | None = None,
        goal: str = "throughput",
        optimizer: str = "adamw",
    ) -> "Plan":
        """The fastest plan that fits a memory budget: a placement and a recompute for each unit, and a micro-batch.

        model         a shardwise.Task (a model, its loss, and how to make a batch), or a name as `shardwise plan` takes
        plan          what is given: its precision, and its mesh and micro_batch where they are set
        cluster       a name as `shardwise plan` takes (default: the devices of this job)
        budget_bytes  memory to use per device (default: all that it has)
        global_batch  samples per step on all ranks (default: plan.accumulate passes of the best micro-batch)
        goal          `throughput`, or `memory` for the smallest peak
        optimizer     adamw, adam, sgd or muon

        Collective: in a job every rank calls it, and gets the plan that rank 0 found.
        """
        solved: Plan = auto_solver()(
            model,
            plan=plan,
            cluster=cluster,
            budget_bytes=budget_bytes,
            global_batch=global_batch,
            goal=goal,
            optimizer=optimizer,
        )
        return solved

    def to_dict(self) -> dict[str, Any]:
        """The plan in TOML's own types, every key written out; what is None is left out."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["overrides"] = dict(self.overrides)
        data["recompute_overrides"] = dict(self.recompute_overrides)
        data["keep_fp32"] = list(self.keep_fp32)
        data["owned"] = list(self.owned)
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
            mesh = table_of("mesh", values["mesh"], allowed=("replicate", "shard"))
            values["mesh"] = Mesh(**mesh)
        if "overrides" in values:
            overrides = table_of("overrides", values["overrides"])
            values["overrides"] = {p: override_of(p, value) for p, value in overrides.items()}
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
            return cls.from_dict(read_toml(path))
        except ShardwiseError as error:
            raise InvalidPlan(f"{path}: {error}") from error


def as_plan(plan: Plan | str) -> Plan:
    """The plan, or the one that only says a strategy: `"fsdp"`."""
    if isinstance(plan, str):
        return Plan(strategy=plan)
    if not isinstance(plan, Plan):
        raise InvalidPlan(f"plan = {_show(plan)}: must be a shardwise.Plan, or the name of a strategy ('fsdp')")
    return plan
