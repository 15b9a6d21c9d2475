"""One plan of one model, ready for the replay: bytes of states, tides of streams, and the moments of its engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.categories import CATEGORIES
from shardwise.placement import SHARDED, Placement
from shardwise.plan import Plan
from shardwise.planner.fold import Short, cut
from shardwise.planner.memory.allocations import Ledger
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.engine_events import EngineSetting, Key, engine_moments
from shardwise.planner.memory.replay import MemoryRow, Replayed, replay
from shardwise.planner.memory.states import OptimizerRule, UnitStates, unit_states
from shardwise.planner.memory.stream_peak import StreamPeak, stream_peak
from shardwise.planner.memory.torch_events import (
    ShardedUnit,
    replicated_moments,
    replicated_states,
    sharded_moments,
    sharded_states,
)
from shardwise.program import StepProgram, build
from shardwise.spec import ROOT, ModelSpec, UnitSpec
from shardwise.spec.law import Line
from shardwise.spec.step import StepRow, StepTrace, Stream


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A plan with a mesh, on a model shortened to the units that are replayed."""

    spec: ModelSpec
    plan: Plan
    short: Short
    traces: Mapping[str, StepTrace]
    optimizer: OptimizerRule
    rules: MemoryRules
    # By the id of its stream; shared by jobs of one model.
    tides_seen: dict[int, StreamPeak] = field(default_factory=dict)
    _cuts: "dict[int, Job]" = field(default_factory=dict)

    def replay(self) -> Replayed:
        return replay(self.moments, at_rest=self.at_rest)

    def cut(self, length: int) -> "Job":
        """The same plan on a model whose rows of equal units are no longer than `length`."""
        if length not in self._cuts:
            runs = self.traces["none"].runs if self.traces else ()
            short = cut(self.spec, plan=self.plan, runs=runs, length=length)
            self._cuts[length] = replace(self, short=short, _cuts={})
        return self._cuts[length]

    @cached_property
    def ledger(self) -> Ledger:
        ledger = Ledger(seq=self.spec.seq, grads_leave_at_once=self.is_native_ddp)
        ledger.write(self.moments)
        return ledger

    @property
    def is_native(self) -> bool:
        return self.plan.engine == "torch"

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        return self.plan.placements(unit.name for unit in self.spec.units)

    @cached_property
    def is_native_ddp(self) -> bool:
        return self.is_native and self.placements[ROOT].params is not SHARDED

    @property
    def num_slices(self) -> int:
        assert self.plan.mesh is not None
        return self.plan.mesh.shard

    @cached_property
    def states(self) -> Mapping[str, UnitStates]:
        if self.is_native and not self.is_native_ddp:
            return {name: states for name, (states, _) in self._sharded.items()}
        return {unit.name: self._states_of(unit) for unit in self.short.spec.units}

    def _states_of(self, unit: UnitSpec) -> UnitStates:
        if self.is_native_ddp:
            return replicated_states(unit, plan=self.plan, optimizer=self.optimizer, rules=self.rules)
        return unit_states(
            unit,
            placement=self.placements[unit.name],
            plan=self.plan,
            num_slices=self.num_slices,
            optimizer=self.optimizer,
            rules=self.rules,
        )

    @cached_property
    def _sharded(self) -> Mapping[str, tuple[UnitStates, ShardedUnit]]:
        return {
            unit.name: sharded_states(
                unit, plan=self.plan, num_slices=self.num_slices, optimizer=self.optimizer, rules=self.rules
            )
            for unit in self.short.spec.units
        }

    @cached_property
    def update_bytes(self) -> int:
        """What the optimizer makes for a while."""
        weights = self.short.weights
        owned = sum(states.owned * weights.get(name, 1) for name, states in self.states.items())
        largest = max(states.largest for states in self.states.values())
        return self.optimizer.copies * owned + self.optimizer.largest * largest

    @cached_property
    def program(self) -> StepProgram:
        """The step of the shortened model."""
        return build(self.short.spec, plan=self.plan)

    @cached_property
    def moments(self) -> Sequence[MemoryRow]:
        """The step, as the plan's engine runs it."""
        return tuple(self._moments())

    def _moments(self) -> Iterable[MemoryRow]:
        weights = self.short.weights
        if self.is_native_ddp:
            return replicated_moments(self.tides(), weights=weights, update_bytes=self.update_bytes)
        if self.is_native:
            return sharded_moments(
                self.tides(),
                placements=self.placements,
                states=self.states,
                units={name: unit for name, (_, unit) in self._sharded.items()},
                weights=weights,
                update_bytes=self.update_bytes,
            )
        setting = EngineSetting(
            plan=self.plan,
            placements=self.placements,
            states=self.states,
            weights=weights,
            rules=self.rules,
            update_bytes=self.update_bytes,
        )
        return engine_moments(self.program, setting=setting, tides=self.tides())

    @cached_property
    def streams(self) -> list[tuple[Key, Stream]]:
        """The rows of the step, each from the trace that recomputes as the row's unit does."""
        if not self.traces:
            return []
        by_way = {
            how: {(row.trigger, row.unit, row.call): row.stream for row in self._rows(trace)}
            for how, trace in self.traces.items()
        }
        # Recomputation changes what happens at a row, never the order of rows.
        none = by_way["none"]
        return [(key, by_way[self.plan.recompute_of(key[1])].get(key, stream)) for key, stream in none.items()]

    def _rows(self, trace: StepTrace) -> Iterable[StepRow]:
        """Of a shortened model; the units that stand for others count for them."""
        chosen = {run.units: names for run, names in self.short.chosen.items()}
        names = {run: chosen[run.units] for run in trace.runs if run.units in chosen}
        weights = self.short.weights
        num_units = {run: sum(weights.get(name, 1) for name in names.get(run, run.units)) for run in trace.runs}
        return trace.expand(names, num_units=num_units)

    def tides(self) -> list[tuple[Key, StreamPeak]]:
        return [(key, self._tide(stream)) for key, stream in self.streams]

    def _tide(self, stream: Stream) -> StreamPeak:
        found = self.tides_seen.get(id(stream))
        if found is None:
            # A tide holds on to its stream, so that no other can get its id.
            found = self.tides_seen[id(stream)] = stream_peak(
                stream, seq=self.spec.seq, rules=self.rules, grads_leave_at_once=self.is_native_ddp
            )
        return found

    @cached_property
    def at_rest(self) -> tuple[Line, ...]:
        """What a rank holds when a step begins, by category."""
        totals = dict.fromkeys(CATEGORIES, 0)
        plan = self.plan
        for name, states in self.states.items():
            weight = self.short.weights.get(name, 1)
            totals["params"] += weight * states.params
            totals["optim"] += weight * states.optim
            totals["other"] += weight * states.buffers
            if self.is_native_ddp:
                totals["grads"] += weight * states.grads
            elif not self.is_native:
                kept = self.rules.keeps_reduce_buffers and self.placements[name].grads is not SHARDED
                if plan.accumulate > 1 and not plan.accumulate_reduced:
                    totals["reduce"] += weight * states.reduce
                elif plan.accumulate > 1 or kept:
                    totals["grads"] += weight * (states.reduce if kept else states.grads)
        totals["other"] += self.rules.workspace_bytes
        if not self.is_native:
            # A flag for each parameter: was it used? (engine/grads/used.py)
            totals["other"] += 4 * sum(len(unit.params) for unit in self.spec.units)
        batch = self.spec.batch_bytes.line(self.spec.seq) if self.spec.batch_bytes is not None else Line(0, 0)
        lines = {name: Line(total, 0) for name, total in totals.items()}
        lines["activations"] = batch
        return tuple(lines[name] for name in CATEGORIES)
