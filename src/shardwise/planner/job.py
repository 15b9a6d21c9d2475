"""`Job`: one plan of one model, prepared for the replay: bytes of states, peaks of streams, changes of the engine."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.base.vocabulary.dtypes import BYTES_PER_ELEMENT, PRECISIONS
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.planner.engine_model import EngineModel, engine_model_of
from shardwise.planner.fold import Key, Short, cut
from shardwise.planner.memory.allocations import Ledger
from shardwise.planner.memory.constants import RULES, MemoryRules
from shardwise.planner.memory.events import MemoryExecutor, MemorySetting, memory_rows, saved_of_root
from shardwise.planner.memory.executors.ddp_memory import PlainMemory
from shardwise.planner.memory.replay import MemoryRow, Replayed, replay
from shardwise.planner.memory.states import OptimizerRule, StateSetting, UnitStates, optimizer_of
from shardwise.planner.memory.stream_peak import StreamPeak, stream_peak
from shardwise.planner.ways import fp8_way, memory_way
from shardwise.planner.whole_matrices import MASTER_BYTES, WholeMatrices, update_bytes, whole_matrices
from shardwise.program import StepProgram, build, build_first_step
from shardwise.program.chunks import CHUNK_ELEMENTS, NUM_SLOTS
from shardwise.program.spec import ROOT, ModelSpec
from shardwise.program.spec.step import BEFORE_FORWARD, Line, Op, StepRow, StepTrace, Stream

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operations that are matrix products."""


def _is_narrow(op: Op, *, seq: int | None) -> bool:
    """Return whether a matrix product's operands and result have 16 bits."""
    *count, m, n, k = (dim.at(batch=1, seq=seq) for dim in op.dims)
    num_elements = prod(count) * (m * k + k * n + m * n)
    return op.num_bytes.at(batch=1, seq=seq) < 3 * num_elements


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A plan with a mesh, on a model shortened to the units that are replayed (fold.py)."""

    spec: ModelSpec
    plan: Plan
    short: Short
    traces: Mapping[str, StepTrace]
    # The name of its rule, and `cpu` or `cuda`.
    optimizer_name: str
    device: str
    # (computes in, recompute) → what units that multiply in fp8 allocate.
    fp8_traces: Mapping[tuple[str, str], StepTrace] = field(default_factory=dict)
    # Whether an engine runs it, or an ordinary loop on one device.
    is_wrapped: bool = True
    # Whether the units that may be CUDA graphs are; under capture = 'auto' only the run decides.
    as_graphs: bool = False
    # By the id of the stream; shared by the jobs of a model.
    known_peaks: dict[int, StreamPeak] = field(default_factory=dict)
    _cuts: "dict[int, Job]" = field(default_factory=dict)

    @cached_property
    def optimizer(self) -> OptimizerRule:
        return optimizer_of(self.optimizer_name)

    @property
    def rules(self) -> MemoryRules:
        return RULES[self.device]

    @cached_property
    def replayed(self) -> Replayed:
        return replay(self.memory_rows, at_rest=self.at_rest)

    def cut(self, length: int) -> "Job":
        """Return the same plan on a model with at most `length` equal units in a row."""
        if length not in self._cuts:
            runs = self.traces["none"].runs if self.traces else ()
            short = cut(self.spec, plan=self.plan, runs=runs, length=length)
            self._cuts[length] = replace(self, short=short, _cuts={})
        return self._cuts[length]

    @property
    def unshortened(self) -> "Job":
        """The same plan on the model with all of its units."""
        if not self.short.weights:
            return self
        return replace(self, short=Short(spec=self.spec, weights={}, chosen={}), _cuts={})

    @cached_property
    def ledger(self) -> Ledger:
        return self._ledger(self.memory_rows)

    @cached_property
    def first_ledger(self) -> Ledger:
        return self._ledger(self.first_rows) if self.in_order else self.ledger

    def _ledger(self, rows: Iterable[MemoryRow]) -> Ledger:
        graphs = self.graph_units
        ledger = Ledger(
            grads_leave_at_once=self.engine.grads_leave_at_once,
            graph_units=graphs,
            # Otherwise they outlive a pass, whose graphs would overwrite them.
            gradients_apart=bool(graphs) and self.plan.accumulate == 1,
        )
        ledger.write(rows)
        return ledger

    @cached_property
    def graph_units(self) -> frozenset[str]:
        """The units that are CUDA graphs."""
        if not self.as_graphs:
            return frozenset()
        units = (unit for unit in self.short.spec.units if unit.name != ROOT and not unit.from_root)
        return frozenset(unit.name for unit in units if self.plan.may_capture(unit.name))

    @cached_property
    def engine(self) -> EngineModel:
        return engine_model_of(self.plan)

    @cached_property
    def precision(self) -> str:
        """The precision of most matrix products: the plan's; under `native` by the bytes of their operands.

        Parameters do not say it: a quantised base is multiplied in the dtype that it is unpacked to.
        """
        if self.plan.has_fp8:
            # Of everything but the products that compute.py times in fp8.
            return "bf16"
        if self.plan.precision != "native":
            return self.plan.precision
        dtypes = {param.dtype for unit in self.spec.units for param in unit.params}
        narrow = "fp16" if "float16" in dtypes and "bfloat16" not in dtypes else "bf16"
        num_flops: Counter[str] = Counter()
        for _, stream in self.streams:
            for op in stream.ops:
                if op.name in PRODUCTS and len(op.dims) in (3, 4):
                    num_flops[narrow if _is_narrow(op, seq=self.spec.seq) else "fp32"] += op.num_flops.at(
                        batch=1, seq=self.spec.seq
                    )
        return max(num_flops, key=lambda word: num_flops[word], default="fp32")

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        return self.plan.placements(unit.name for unit in self.spec.units)

    @property
    def mesh(self) -> Mesh:
        assert self.plan.mesh is not None
        return self.plan.mesh

    @property
    def num_slices(self) -> int:
        return self.mesh.shard

    @property
    def _state_setting(self) -> StateSetting:
        return StateSetting(plan=self.plan, mesh=self.mesh, optimizer=self.optimizer, rules=self.rules)

    @cached_property
    def states(self) -> Mapping[str, UnitStates]:
        setting = self._state_setting
        return {
            unit.name: self.engine.states(unit, placement=self.placements[unit.name], setting=setting)
            for unit in self.short.spec.units
        }

    def weight(self, unit: str) -> int:
        """Return how many units of the model a unit stands for."""
        return self.short.weights.get(unit, 1)

    @cached_property
    def matrices(self) -> WholeMatrices:
        """The matrices that are stepped unsharded."""
        return whole_matrices(
            ((unit, self.weight(unit.name)) for unit in self.short.spec.units),
            plan=self.plan,
            placements=self.placements,
            optimizer=self.optimizer,
            num_slices=self.num_slices,
        )

    @cached_property
    def owned_moments(self) -> tuple[int, ...]:
        """Sizes of the allocations of optimizer state for the matrices that rank 0 owns."""
        return self._state_setting.moments((matrix.param, matrix.num_bytes) for matrix in self.matrices.owned[0])

    @cached_property
    def update_bytes(self) -> int:
        """Temporaries of the optimizer's step."""
        return update_bytes(
            self.matrices.on(0),
            optimizer=self.optimizer,
            in_slices=sum(states.owned * self.weight(name) for name, states in self.states.items()),
            largest_slice=max(states.largest for states in self.states.values()),
        )

    @cached_property
    def program(self) -> StepProgram:
        """The step of the shortened model."""
        return self.build_program()

    def build_program(self, *, reduces: bool = True) -> StepProgram:
        """Build the program of a step or, with `reduces=False`, of a pass that keeps its gradients."""
        return build(self.short.spec, plan=self.plan, reduces=reduces)

    @cached_property
    def memory_rows(self) -> Sequence[MemoryRow]:
        """The rows of a step in the middle of training."""
        return self._memory_rows(self.program)

    @cached_property
    def first_rows(self) -> Sequence[MemoryRow]:
        """The rows of the first step, in which our engine learns the order of gathers."""
        if not self.in_order:
            return self.memory_rows
        return self._memory_rows(build_first_step(self.short.spec, plan=self.plan))

    def _memory_rows(self, program: StepProgram) -> Sequence[MemoryRow]:
        found = memory_rows(
            program,
            self._memory(),
            peaks=[(key, self._stream_peak(stream)) for key, stream in self.memory_streams],
            in_order=self.in_order,
            plan=self.plan,
            weights=self.short.weights,
            rules=self.rules,
            saved=self.saved_by_units,
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
            owned=self.matrices.owned_bytes(0),
        )
        return (self.engine.memory if self.is_wrapped else PlainMemory)(self.program, setting)

    @property
    def in_order(self) -> bool:
        """Return whether a unit with early gradients waits for its turn (Cursor.begin_backward)."""
        return self.engine.keeps_program_order and self.gathers

    @cached_property
    def gathers(self) -> bool:
        """Return whether parameters of any unit are gathered."""
        return any(placement.params.is_sharded for placement in self.placements.values())

    @property
    def num_communicators(self) -> int:
        """Communicators of a process (comm/groups/groups.py): the job's, the engine's, and those of two axes."""
        of_gathers = self.engine.has_own_groups and self.gathers and self.mesh.shard > 1
        of_axes = 2 if self.mesh.replicate > 1 and self.mesh.shard > 1 else 0
        return 1 + self.engine.has_own_groups + of_gathers + of_axes

    @cached_property
    def streams(self) -> list[tuple[Key, Stream]]:
        """The streams of the step's rows, each from the trace of its unit's recompute mode."""
        return self._streams(lambda unit: self._by_way[self.plan.recompute_of(unit)])

    @cached_property
    def memory_streams(self) -> list[tuple[Key, Stream]]:
        """The same for memory: of units that are compiled or multiply in fp8, from a trace of such units, if any."""
        in_fp8 = {way: self._by_key(trace) for way, trace in self.fp8_traces.items()}

        def rows_of(unit: str) -> Mapping[Key, Stream]:
            way = memory_way(self.plan, unit=unit)
            if in_fp8 and (found := in_fp8.get((fp8_way(self.spec.unit(unit), plan=self.plan), way))):
                return found
            return self._by_way.get(way) or self._by_way[self.plan.recompute_of(unit)]

        return self._streams(rows_of)

    def _streams(self, rows_of: Callable[[str], Mapping[Key, Stream]]) -> list[tuple[Key, Stream]]:
        # The ways of running units differ in the streams of rows, never in their order.
        none = self._by_way.get("none", {})
        by_unit = {unit: rows_of(unit) for unit in dict.fromkeys(unit for _, unit, _ in none)}
        return [(key, by_unit[key[1]].get(key, stream)) for key, stream in none.items()]

    @cached_property
    def _by_way(self) -> Mapping[str, Mapping[Key, Stream]]:
        return {way: self._by_key(trace) for way, trace in self.traces.items()}

    def _by_key(self, trace: StepTrace) -> Mapping[Key, Stream]:
        return {(row.trigger, row.unit, row.call): row.stream for row in self._rows(trace)}

    def _rows(self, trace: StepTrace) -> Iterable[StepRow]:
        """Return the rows of the shortened model; a unit that stands for others counts for them."""
        kept = {unit.name for unit in self.short.spec.units}
        names = {run: tuple(name for name in run.units if name in kept) for run in trace.runs}
        num_units = {run: sum(map(self.weight, names[run])) for run in trace.runs}
        return trace.expand(names, num_units=num_units)

    def _stream_peak(self, stream: Stream) -> StreamPeak:
        found = self.known_peaks.get(id(stream))
        if found is None:
            # A peak keeps a reference to its stream, so that the id stays unique.
            found = self.known_peaks[id(stream)] = stream_peak(
                stream, seq=self.spec.seq, rules=self.rules, grads_leave_at_once=self.engine.grads_leave_at_once
            )
        return found

    @cached_property
    def at_rest(self) -> tuple[Line, ...]:
        """Bytes by category when a step begins."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for name, states in self.states.items():
            weight = self.weight(name)
            totals["params"] += weight * states.params
            totals["optim"] += weight * states.optim
            totals["other"] += weight * states.buffers
        totals["optim"] += sum(self.owned_moments)
        totals["other"] += self.rules.workspace_bytes + self._slot_bytes
        for name, num_bytes in self._memory().at_rest().items():
            totals[name] += num_bytes
        batch = self.spec.batch_bytes.line(self.spec.seq) if self.spec.batch_bytes is not None else Line(0, 0)
        lines = {name: Line(total, 0) for name, total in totals.items()}
        lines["activations"] = Line(batch.const, batch.per_sample)
        return tuple(lines[name] for name in CATEGORIES)

    @property
    def _slot_bytes(self) -> int:
        """Memory through which the states of units in host memory pass: master, moments and the cast parameters."""
        if not self.plan.offload_states or self.plan.offload_update != "device":
            return 0
        chunk = min(CHUNK_ELEMENTS, max(states.chunk for states in self.states.values()))
        cast = BYTES_PER_ELEMENT[PRECISIONS[self.precision]] if self.precision != "fp32" else 0
        return NUM_SLOTS * chunk * (MASTER_BYTES * (1 + self.optimizer.num_moments) + cast)

    @cached_property
    def host_line(self) -> Line:
        """Bytes in host memory on one rank: states, and activations that wait there for backward."""
        # The first step does not know yet with which unit backward begins; its memory is kept.
        saved = self.saved_by_units
        const, per_sample = (sum(getattr(line, name) for line in saved.values()) for name in ("const", "per_sample"))
        shared = saved_of_root(self.memory_streams, seq=self.spec.seq) if saved else 0
        return Line(self.states_on_host + const + shared, per_sample)

    @property
    def states_on_host(self) -> int:
        return sum(self.weight(name) * states.host for name, states in self.states.items())

    @cached_property
    def saved_by_units(self) -> Mapping[str, Line]:
        """Return what the forwards of units save in host memory in a first step, in their order.

        Not what a layer that was taken out of the root saves, which the engine leaves where it is, as the root's.
        """
        if not self.plan.offload_activations:
            return {}
        on_host = {unit.name for unit in self.short.spec.units if not unit.from_root}
        ends = {
            unit: self._stream_peak(stream).end
            for (trigger, unit, _), stream in self.memory_streams
            if trigger == BEFORE_FORWARD and unit in on_host and self.plan.has_activations_on_host(unit)
        }
        return {unit: Line(end[0], end[1]) for unit, end in ends.items()}

    @property
    def saved_on_host(self) -> Mapping[str, Line]:
        """Return what units save in host memory, in forward order; the one with which backward begins keeps its own."""
        return dict(list(self.saved_by_units.items())[:-1])

    def buffers_at_rest(self) -> list[int]:
        """Return the sizes of the allocations for gradients among those at rest."""
        return self._memory().buffers_at_rest()
