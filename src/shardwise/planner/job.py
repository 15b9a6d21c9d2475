"""One plan of one model, ready for the replay: bytes of states, peaks of streams, and what its engine allocates."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, Placement
from shardwise.planner.engine_model import EngineModel, engine_model_of
from shardwise.planner.fold import Short, cut
from shardwise.planner.memory.allocations import Ledger
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.events import memory_rows
from shardwise.planner.memory.executors.setting import MemoryExecutor, MemorySetting
from shardwise.planner.memory.replay import MemoryRow, Replayed, replay
from shardwise.planner.memory.states import OptimizerRule, UnitStates, moment_bytes
from shardwise.planner.memory.stream_peak import StreamPeak, stream_peak
from shardwise.planner.trace_order import Key
from shardwise.planner.ways import memory_way
from shardwise.planner.whole_matrices import WholeMatrices, update_bytes, whole_matrices
from shardwise.program import StepProgram, build, build_first_step
from shardwise.spec import ModelSpec
from shardwise.spec.law import Line
from shardwise.spec.step import StepRow, StepTrace, Stream
from shardwise.vocabulary.categories import CATEGORIES
from shardwise.vocabulary.dtypes import PRECISIONS


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
    known_peaks: dict[int, StreamPeak] = field(default_factory=dict)
    _cuts: "dict[int, Job]" = field(default_factory=dict)

    def replay(self) -> Replayed:
        return replay(self.memory_rows, at_rest=self.at_rest)

    def cut(self, length: int) -> "Job":
        """The same plan on a model whose rows of equal units are no longer than `length`."""
        if length not in self._cuts:
            runs = self.traces["none"].runs if self.traces else ()
            short = cut(self.spec, plan=self.plan, runs=runs, length=length)
            self._cuts[length] = replace(self, short=short, _cuts={})
        return self._cuts[length]

    @cached_property
    def ledger(self) -> Ledger:
        return self._ledger(self.memory_rows)

    @cached_property
    def first_ledger(self) -> Ledger:
        """That of a first step."""
        return self._ledger(self.first_rows) if self.in_order else self.ledger

    def _ledger(self, rows: Iterable[MemoryRow]) -> Ledger:
        ledger = Ledger(seq=self.spec.seq, grads_leave_at_once=self.engine.grads_leave_at_once)
        ledger.write(rows)
        return ledger

    @cached_property
    def engine(self) -> EngineModel:
        return engine_model_of(self.plan)

    @cached_property
    def precision(self) -> str:
        """What most of the model multiplies in: the plan's; under `native` that of most parameters."""
        if self.plan.precision != "native":
            return self.plan.precision
        num_elements: Counter[str] = Counter()
        for param in (param for unit in self.spec.units for param in unit.params):
            num_elements[param.dtype] += prod(param.shape)
        words = {dtype: word for word, dtype in PRECISIONS.items()}
        return words.get(max(num_elements, key=lambda dtype: num_elements[dtype], default="float32"), "fp32")

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        return self.plan.placements(unit.name for unit in self.spec.units)

    @property
    def num_slices(self) -> int:
        assert self.plan.mesh is not None
        return self.plan.mesh.shard

    @cached_property
    def states(self) -> Mapping[str, UnitStates]:
        return {
            unit.name: self.engine.states(
                unit,
                placement=self.placements[unit.name],
                plan=self.plan,
                num_slices=self.num_slices,
                optimizer=self.optimizer,
                rules=self.rules,
            )
            for unit in self.short.spec.units
        }

    @cached_property
    def owned_bytes(self) -> int:
        """What the optimizer steps, and as much as its gradients take."""
        weights = self.short.weights
        return sum(states.owned * weights.get(name, 1) for name, states in self.states.items())

    @cached_property
    def whole(self) -> WholeMatrices:
        """What is stepped whole."""
        return whole_matrices(
            ((unit, self.short.weights.get(unit.name, 1)) for unit in self.short.spec.units),
            plan=self.plan,
            placements=self.placements,
            optimizer=self.optimizer,
            num_slices=self.num_slices,
        )

    @cached_property
    def owned_moments(self) -> tuple[int, ...]:
        """The single allocations of the state of what rank 0 owns."""
        steps = [(matrix.param, matrix.num_bytes) for matrix in self.whole.owned[0]]
        return moment_bytes(steps, optimizer=self.optimizer, rules=self.rules)

    @cached_property
    def update_bytes(self) -> int:
        """What the optimizer makes for a while."""
        largest = max(states.largest for states in self.states.values())
        return update_bytes(
            self.whole.on(0), optimizer=self.optimizer, in_slices=self.owned_bytes, largest_slice=largest
        )

    @cached_property
    def program(self) -> StepProgram:
        """The step of the shortened model."""
        return self.build_program()

    def build_program(self, *, reduces: bool = True) -> StepProgram:
        """With `reduces=False`, of a pass that keeps its gradients."""
        return build(self.short.spec, plan=self.plan, reduces=reduces)

    @cached_property
    def memory_rows(self) -> Sequence[MemoryRow]:
        """The step, as the plan's engine runs it."""
        return self._memory_rows(self.program)

    @cached_property
    def first_rows(self) -> Sequence[MemoryRow]:
        """The first step: our engine learns in it which units it gathers when."""
        if not self.in_order:
            return self.memory_rows
        return self._memory_rows(build_first_step(self.short.spec, plan=self.plan))

    def _memory_rows(self, program: StepProgram) -> Sequence[MemoryRow]:
        found = memory_rows(
            program,
            self._memory(),
            peaks=self.stream_peaks(),
            in_order=self.in_order,
            plan=self.plan,
            weights=self.short.weights,
            rules=self.rules,
        )
        return tuple(found)

    def _memory(self) -> MemoryExecutor:
        setting = MemorySetting(
            plan=self.plan,
            placements=self.placements,
            states=self.states,
            weights=self.short.weights,
            rules=self.rules,
            update_bytes=self.update_bytes,
            num_params=sum(len(unit.params) for unit in self.spec.units),
            num_slices=self.num_slices,
            owned=self.whole.owned_bytes(0),
        )
        return self.engine.memory(self.program, setting)

    @property
    def in_order(self) -> bool:
        """Whether a unit whose gradients are ready early waits for its turn (Cursor.begin_backward)."""
        return self.engine.keeps_program_order and self.gathers

    @cached_property
    def gathers(self) -> bool:
        """Whether parameters of any unit are gathered."""
        return any(placement.params is SHARDED for placement in self.placements.values())

    @property
    def num_communicators(self) -> int:
        """Of a process. A second axis of the mesh has one of its own; a rank that gathers from itself needs none."""
        assert self.plan.mesh is not None
        of_gathers = self.engine.gather_communicators if self.gathers and self.plan.mesh.shard > 1 else 0
        return self.engine.num_communicators + of_gathers + (self.plan.mesh.replicate > 1)

    @cached_property
    def streams(self) -> list[tuple[Key, Stream]]:
        """The rows of the step, each from the trace that recomputes as the row's unit does."""
        return self._streams(self.plan.recompute_of)

    @cached_property
    def memory_streams(self) -> list[tuple[Key, Stream]]:
        """The same, each from the trace that allocates as the row's unit does, compiled or not."""

        def way_of(unit: str) -> str:
            way = memory_way(self.plan, unit=unit)
            return way if way in self.traces else self.plan.recompute_of(unit)

        return self._streams(way_of)

    def _streams(self, way_of: Callable[[str], str]) -> list[tuple[Key, Stream]]:
        # How units run changes what happens at a row, never the order of rows.
        none = self._by_way.get("none", {})
        return [(key, self._by_way[way_of(key[1])].get(key, stream)) for key, stream in none.items()]

    @cached_property
    def _by_way(self) -> Mapping[str, Mapping[Key, Stream]]:
        return {
            way: {(row.trigger, row.unit, row.call): row.stream for row in self._rows(trace)}
            for way, trace in self.traces.items()
        }

    def _rows(self, trace: StepTrace) -> Iterable[StepRow]:
        """Of a shortened model; the units that stand for others count for them."""
        chosen = {run.units: names for run, names in self.short.chosen.items()}
        names = {run: chosen[run.units] for run in trace.runs if run.units in chosen}
        weights = self.short.weights
        num_units = {run: sum(weights.get(name, 1) for name in names.get(run, run.units)) for run in trace.runs}
        return trace.expand(names, num_units=num_units)

    def stream_peaks(self) -> list[tuple[Key, StreamPeak]]:
        return [(key, self._stream_peak(stream)) for key, stream in self.memory_streams]

    def _stream_peak(self, stream: Stream) -> StreamPeak:
        found = self.known_peaks.get(id(stream))
        if found is None:
            # A peak holds on to its stream, so that no other can get its id.
            found = self.known_peaks[id(stream)] = stream_peak(
                stream, seq=self.spec.seq, rules=self.rules, grads_leave_at_once=self.engine.grads_leave_at_once
            )
        return found

    @cached_property
    def at_rest(self) -> tuple[Line, ...]:
        """What a rank holds when a step begins, by category."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for name, states in self.states.items():
            weight = self.short.weights.get(name, 1)
            totals["params"] += weight * states.params
            totals["optim"] += weight * states.optim
            totals["other"] += weight * (states.buffers + sum(states.samples))
        totals["optim"] += sum(self.owned_moments)
        totals["other"] += self.rules.workspace_bytes
        for name, num_bytes in self._memory().at_rest().items():
            totals[name] += num_bytes
        batch = self.spec.batch_bytes.line(self.spec.seq) if self.spec.batch_bytes is not None else Line(0, 0)
        lines = {name: Line(total, 0) for name, total in totals.items()}
        # A graph reads its batch from a place of its own.
        copies = 2 if self.plan.captures else 1
        lines["activations"] = Line(copies * batch.const, copies * batch.per_sample)
        return tuple(lines[name] for name in CATEGORIES)

    def buffers_at_rest(self) -> list[int]:
        """Of that, the single allocations for gradients."""
        return self._memory().buffers_at_rest()
