"""The plan: everything that decides how a model is trained on many ranks, as one frozen value.

The planner costs it, the engine runs it, and it is saved as TOML, so that both work on the same plan.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from reprlib import repr as show
from typing import Any, Self

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import read_toml
from shardwise.base.files.form import refusing
from shardwise.base.files.keys import check_keys, documented, to_table, values_of
from shardwise.base.vocabulary.auto_solver import auto_solver
from shardwise.base.vocabulary.html_table import html_table
from shardwise.plan.limits import LIMITS, check_settings
from shardwise.plan.patterns import Patterns, is_among, unmatched
from shardwise.plan.placement import ACROSS, AUTO, STRATEGIES, Placement, placement_of, resolve_strategy
from shardwise.plan.plan_keys import PlanKeys


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanKeys):
    """A plan says how a model is trained on many ranks."""

    def __post_init__(self) -> None:
        check_keys(self, error=InvalidPlan)
        assert isinstance(self.overrides, Patterns)
        replicate = self.mesh.replicate if self.mesh is not None else 1
        # One spelling for one plan, so that equal plans are equal values.
        own = {pattern: resolve_strategy(name, replicate=replicate) for pattern, name in self.overrides.items()}
        object.__setattr__(self, "overrides", Patterns(own))
        object.__setattr__(self, "strategy", resolve_strategy(self.strategy, replicate=replicate))
        self._check_combination()

    @property
    def is_sharded_across(self) -> bool:
        """Return whether states are sharded over the replicate axis of the mesh too."""
        return self.across != ACROSS[0]

    @property
    def across_text(self) -> str:
        """Return what follows the name of the strategy in texts: "", or " across zero2"."""
        return f" across {self.across}" if self.is_sharded_across else ""

    def under(self, strategy: str) -> Self:
        """Return this plan with another strategy, and without `across` where that leaves nothing to shard."""
        across = self.across if STRATEGIES[strategy].params.is_sharded else ACROSS[0]
        return replace(self, strategy=strategy, across=across)

    def _check_across(self) -> None:
        """Refuse `across` where there is nothing that it could shard."""
        given = f"across = {self.across!r}"
        if self.mesh is None:
            raise InvalidPlan(
                f"{given} without a mesh: give nodes × ranks per node, such as Mesh(replicate=2, shard=8) in a plan or "
                "--mesh 2x8"
            )
        if self.mesh.replicate == 1:
            shard = self.mesh.shard
            groups, ranks = (max(shard, 2), 1) if shard % 2 else (2, shard // 2)
            raise InvalidPlan(
                f"{given} on a mesh of {self.mesh}: its replicate axis has one rank; give a longer one, such as "
                f"Mesh(replicate={groups}, shard={ranks}) in a plan or --mesh {groups}x{ranks}"
            )
        rows = [] if self.is_auto else [self.strategy, *map(str, self.overrides.values())]
        if rows and not any(STRATEGIES[row].params.is_sharded for row in rows):
            raise InvalidPlan(
                f"{given} with strategy = {self.strategy!r}: only sharded parameters leave a choice; leave across out "
                f"and set mesh = Mesh(shard={self.mesh.num_ranks}), or use shard_grad_op or fsdp"
            )
        for setting in ("owned", "offload_states"):
            if getattr(self, setting):
                raise InvalidPlan(f"{setting} with {given}: it follows one axis of a mesh; leave one of them out")

    def _check_combination(self) -> None:
        check_settings(self)
        if self.is_sharded_across:
            self._check_across()
        if self.is_auto and (self.overrides or self.recompute_overrides):
            raise InvalidPlan("strategy = 'auto' chooses for each unit: leave overrides and recompute_overrides out")
        if self.owned and self.offload_states:
            raise InvalidPlan(
                "owned with offload_states: what one rank steps whole is stepped on the device, with its state; "
                "leave one of them out"
            )
        if self.updates_in_backward and self.backward_hindrance:
            raise InvalidPlan(f"update = 'backward' with {self.backward_hindrance}: leave one of them out")
        if self.precision == "native" and self.keep_fp32:
            raise InvalidPlan("keep_fp32 with precision = 'native': native leaves every module's dtypes alone")
        if self.has_fp8 and self.reduce_dtype == "fp16":
            raise InvalidPlan("precision = 'fp8' with reduce_dtype = 'fp16': set reduce_dtype = 'fp32' or 'bf16'")
        if self.keep_bf16 and not self.has_fp8:
            raise InvalidPlan(f"keep_bf16 with precision = {self.precision!r}: it is for precision = 'fp8'")

    @property
    def backward_hindrance(self) -> str:
        """Return the setting that prevents updates inside backward; "" if there is none."""
        settings = {
            "precision = 'fp16'": self.precision == "fp16",
            "accumulate_reduced = true": self.accumulate_reduced,
            "offload_update = 'host'": bool(self.offload_states) and self.offload_update == "host",
            "owned": bool(self.owned),
        }
        return next((setting for setting, holds in settings.items() if holds), "")

    @property
    def updates_in_backward(self) -> bool:
        """Return whether sharded states are updated inside backward."""
        return self.update == "backward"

    @property
    def has_fp8(self) -> bool:
        """Return whether large linear layers multiply in fp8."""
        return self.precision == "fp8"

    @property
    def is_auto(self) -> bool:
        """Return whether the planner has yet to choose the placements."""
        return self.strategy == AUTO

    @property
    def compiler(self) -> str:
        """Return the backend that compiles units; none also while `auto` is undecided."""
        return "none" if self.compile == AUTO else self.compile

    def compiles(self, unit_name: str) -> bool:
        """Return whether a unit is compiled. The root, which contains all other units, is not.

        Nor is a unit under selective recompute on our engine. It runs under a dispatch mode, in which torch.compile
        compiles nothing, but would run code that it compiled for another unit of the same class, and keep that unit's
        tensors. On torch's engine the model recomputes by itself, inside the compiled code.
        """
        if self.compiler == "none" or unit_name == "(root)":
            return False
        return not LIMITS[self.engine].runs("recompute") or self.recompute_of(unit_name) != "selective"

    @property
    def captures(self) -> bool:
        """Return whether units may be CUDA graphs, on a device that has them.

        They may not with `offload_activations`, whose copies run between the kernels of a unit, nor with updates inside
        backward, which would read gradients in the memory of graphs while the next graph runs.
        """
        may_capture = self.capture == "auto" and LIMITS[self.engine].has_graphs
        return may_capture and not self.offload_activations and not self.updates_in_backward

    def _repr_html_(self) -> str:
        """Return the settings that differ from a plan without any, as a table for notebooks."""
        usual = Plan().to_dict()
        shown = {"strategy": self.strategy} | {
            name: value for name, value in self.to_dict().items() if usual.get(name) != value
        }
        return html_table(("setting", "value"), [(name, str(value)) for name, value in shown.items()], title="Plan")

    def placements(self, unit_names: Iterable[str]) -> dict[str, Placement]:
        """Return the placement of each unit; every override must match at least one of them."""
        names = list(unit_names)
        for name in ("overrides", "recompute_overrides", "uncaptured", "offload_states", "offload_activations"):
            given = getattr(self, name)
            for pattern in unmatched(() if isinstance(given, bool) else given, names):
                where = f"{name}.{pattern}" if isinstance(given, Patterns) else f"{name}: {pattern}"
                raise InvalidPlan(
                    f"{where} matches no unit; the units are {_some(names)} "
                    f"(units = {self.units!r}; 'auto + MODULE' makes a module a unit)"
                )
        return {name: self.placement(name) for name in names}

    def placement(self, unit_name: str) -> Placement:
        """Return the placement of one unit."""
        assert isinstance(self.overrides, Patterns)
        if self.is_auto:
            raise InvalidPlan(
                "strategy = 'auto': the plan is not chosen yet; shardwise.Plan.auto(task, ...) chooses it, and so do "
                "`shardwise train` and `shardwise plan --strategy auto --save PLAN.toml`"
            )
        return placement_of(self.overrides.find(unit_name, default=self.strategy), across=self.across)

    def recompute_of(self, unit_name: str) -> str:
        """Return the recompute of a unit; none for the root, where it would be the whole model."""
        assert isinstance(self.recompute_overrides, Patterns)
        return "none" if unit_name == "(root)" else self.recompute_overrides.find(unit_name, default=self.recompute)

    def has_states_on_host(self, unit_name: str) -> bool:
        """Return whether sharded states of a unit live in host memory."""
        return is_among(unit_name, self.offload_states)

    def has_activations_on_host(self, unit_name: str) -> bool:
        """Return whether what a unit saves for backward waits in host memory. The root's does not."""
        return unit_name != "(root)" and is_among(unit_name, self.offload_activations)

    def may_capture(self, unit_name: str) -> bool:
        """Return whether a unit may be a CUDA graph."""
        return self.captures and not any(fnmatchcase(unit_name, pattern) for pattern in self.uncaptured)

    def keeps_fp32(self, path: str) -> bool:
        """Return whether the parameter or module at a path lies in a module that `keep_fp32` names."""
        return _is_named(path, patterns=self.keep_fp32)

    def keeps_bf16(self, path: str) -> bool:
        """Return whether the parameter or module at a path lies in a module that `keep_bf16` names."""
        return _is_named(path, patterns=self.keep_bf16)

    def owns(self, parameter: str) -> bool:
        """Return whether one rank owns the optimizer state of the parameter of that name."""
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
        """Return the fastest plan that fits a memory budget, with a placement and a recompute for each unit.

        model         a shardwise.Task (a model, its loss, and how to make a batch), or a name as `shardwise plan` takes
        plan          settings to keep: the precision, and the mesh and micro_batch where they are set
        cluster       a name as `shardwise plan` takes (default: the devices of this job)
        budget_bytes  memory to use per device (default: all of it)
        global_batch  samples per step on all ranks (default: plan.accumulate passes of the best micro-batch)
        goal          `throughput`, or `memory` for the smallest peak
        optimizer     adamw, adam, sgd or muon

        Collective: in a job every rank calls it and gets the plan of rank 0.
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
        """Return the plan in TOML's own types; keys that are None are left out."""
        return to_table(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the plan that `to_dict` gave; anything else raises an error with the key and the value."""
        with refusing(InvalidPlan):
            return cls(**values_of(cls)(data, ""))

    @property
    def for_any_ranks(self) -> "Plan":
        """Return the plan without its mesh if that has a single axis, so that it runs on any number of ranks."""
        is_flat = self.mesh is not None and self.mesh.replicate == 1
        return replace(self, mesh=None) if is_flat else self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as TOML; an error leaves no partial file."""
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
    """Return the plan itself, or the plan of a strategy's name, such as `"fsdp"`."""
    if isinstance(plan, str):
        return Plan(strategy=plan)
    if not isinstance(plan, Plan):
        raise InvalidPlan(f"plan = {show(plan)}: must be a shardwise.Plan, or the name of a strategy ('fsdp')")
    return plan


def _is_named(path: str, *, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern names what is at a path, or a module around it."""
    if not patterns:
        return False
    parts = path.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(module, pattern) for pattern in patterns for module in above)


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")
