"""What must hold of the program of any model under any plan; a small replay that knows no rule checks it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st
from program.random_specs import cases, specs

from shardwise.plan import Plan
from shardwise.plan.placement import REPLICATED, SHARDED, STRATEGIES
from shardwise.program import Bucket, Kind, Operation, StepProgram, Trigger, build
from shardwise.program.build import _events_and_context
from shardwise.program.rules.ours import OURS
from shardwise.program.spec import ANNOUNCED, NONE, ROOT, UNANNOUNCED, ModelSpec


class Replay:
    """Carries out a program on sets of names, and knows no rule: only what can not be.

    Parameters are `absent`, `arriving`, `here`, or, when only one slice of them was updated, `stale`.
    """

    def __init__(self, spec: ModelSpec, *, plan: Plan, program: StepProgram) -> None:
        self.spec, self.plan = spec, plan
        self.placements = plan.placements(unit.name for unit in spec.units)
        self.buckets = {bucket.name: bucket for bucket in program.buckets}
        self.num_calls = Counter(spec.call_order)
        self.params = {name: self.between_steps(name) for name in self.placements}
        self.start_step()

    def start_step(self) -> None:
        self.running: list[str] = []  # forwards that have begun and not ended, the innermost last
        self.called: set[str] = set()
        self.going_back: set[str] = set()  # backward has begun, gradients are not complete
        self.num_backwards: Counter[str] = Counter()
        self.num_broadcasts = 0
        self.taken: set[str] = set()
        self.reducing: list[str] = []
        self.reduced: list[str] = []
        self.summed: list[str] = []  # waited for, and not sent over a second axis yet
        self.crossing: list[str] = []
        self.with_gradients: list[str] = []
        self.updated = False
        self.flagged = False

    def sharded(self, name: str) -> bool:
        return self.placements[name].params is SHARDED and self.spec.unit(name).num_params > 0

    def trainable(self, name: str) -> bool:
        return any(param.trainable for param in self.spec.unit(name).params)

    def updates_a_slice(self, name: str) -> bool:
        placement = self.placements[name]
        return placement.params is REPLICATED and placement.optim is SHARDED and self.trainable(name)

    def crosses(self, bucket: str) -> bool:
        """Whether the sum over the shard axis is not yet the gradient."""
        has_second_axis = self.plan.mesh is not None and self.plan.mesh.replicate > 1
        return has_second_axis and self.grads_sharded(bucket)

    def grads_sharded(self, bucket: str) -> bool:
        return self.placements[self.buckets[bucket].units[0]].grads is SHARDED

    def between_steps(self, name: str) -> str:
        if self.sharded(name):
            return "absent"
        is_alone = self.plan.mesh is not None and self.plan.mesh.shard == 1
        return "arriving" if self.updates_a_slice(name) and not is_alone else "here"

    def whole(self) -> set[str]:
        """The sharded units that take the memory of whole ones."""
        return {name for name, state in self.params.items() if self.sharded(name) and state != "absent"}

    def happens(self, trigger: Trigger, name: str) -> None:
        """An event of the model itself, after its row's operations."""
        if trigger is Trigger.AFTER_FORWARD:
            assert self.running.pop() == name
            if self.spec.unit(name).backward == UNANNOUNCED:
                self.going_back.add(name)
        elif trigger is Trigger.GRADS_READY:
            assert self.num_backwards[name] == self.num_calls_back(name)
            self.going_back.remove(name)
        elif trigger is Trigger.BACKWARD_DONE:
            assert not any(self.spec.unit(unit).params for unit in self.going_back)
            self.going_back.clear()

    def num_calls_back(self, name: str) -> int:
        """How often backward is announced."""
        return self.num_calls[name] if self.spec.unit(name).backward == ANNOUNCED else 0

    def do(self, operation: Operation) -> None:
        {
            Kind.GATHER: self.gather,
            Kind.WAIT_GATHER: self.wait_gather,
            Kind.FORWARD: self.forward,
            Kind.FREE: self.free,
            Kind.BACKWARD: self.backward,
            Kind.TAKE_GRADS: self.take_grads,
            Kind.REDUCE: self.reduce,
            Kind.WAIT_REDUCE: self.wait_reduce,
            Kind.REDUCE_SLICE: self.reduce_slice,
            Kind.WAIT_SLICE: self.wait_slice,
            Kind.REDUCE_FLAGS: self.reduce_flags,
            Kind.BROADCAST: self.broadcast,
            Kind.UPDATE: self.update,
        }[operation.kind](operation.subject)
        if operation.is_local and operation.kind is Kind.GATHER:
            # A copy on this rank.
            self.wait_gather(operation.subject)

    def gather(self, name: str) -> None:
        assert self.params[name] == ("absent" if self.sharded(name) else "stale")
        self.params[name] = "arriving"

    def wait_gather(self, name: str) -> None:
        assert self.params[name] == "arriving"
        self.params[name] = "here"

    def forward(self, name: str) -> None:
        self.running.append(name)
        self.called.add(name)
        assert all(self.params[outer] == "here" for outer in self.running)

    def backward(self, name: str) -> None:
        self.num_backwards[name] += 1
        self.going_back.add(name)
        assert all(self.params[outer] == "here" for outer in self.going_back)

    def free(self, name: str) -> None:
        assert self.sharded(name)
        assert name not in self.running[:-1], "units inside it still run"
        assert self.params[name] == "here", "it was not gathered, or nobody waited for it"
        self.params[name] = "absent"

    def take_grads(self, name: str) -> None:
        unit = self.buckets[name].units[0] if name in self.buckets else name
        assert name not in self.taken
        assert self.trainable(unit)
        assert self.num_backwards[unit] == self.num_calls_back(unit)
        self.taken.add(name)
        # At most one piece of a unit waits to be reduced.
        pieces = [one.name for one in self.buckets.values() if unit in one.units and one.num_pieces > 1]
        assert len(self.taken.intersection(pieces) - {*self.reduced}) <= 1

    def reduce(self, name: str) -> None:
        bucket = self.buckets[name]
        assert name not in self.reduced
        assert self.taken.issuperset(map(bucket.taken_as, bucket.units))
        assert all(self.num_backwards[member] == self.num_calls_back(member) for member in bucket.units)
        self.reduced.append(name)
        self.reducing.append(name)
        assert len([other for other in self.reducing if self.grads_sharded(other)]) <= self.plan.reduces_in_flight
        # The slice of the bucket that was waited for before it is on its way, and no other.
        assert not self.summed
        assert len(self.crossing) <= 1

    def reduce_flags(self, name: str) -> None:
        assert Counter(self.reduced) == Counter(list(self.buckets))
        self.flagged = True

    def wait_reduce(self, name: str) -> None:
        assert not self.summed
        assert len(self.crossing) <= 1
        self.reducing.remove(name)
        (self.summed if self.crosses(name) else self.with_gradients).append(name)

    def reduce_slice(self, name: str) -> None:
        self.summed.remove(name)
        self.crossing.append(name)
        assert len(self.crossing) <= 2

    def wait_slice(self, name: str) -> None:
        """In the order in which they were sent."""
        assert self.crossing.pop(0) == name
        self.with_gradients.append(name)

    def broadcast(self, name: str) -> None:
        assert not self.running
        assert any(buffer.persistent for unit in self.spec.units for buffer in unit.buffers)
        self.num_broadcasts += 1

    def update(self, name: str) -> None:
        assert not self.running
        assert not self.going_back
        assert not self.whole()
        assert not self.reducing
        assert not self.summed
        assert not self.crossing
        assert Counter(self.with_gradients) == Counter(self.reduced)
        assert self.flagged
        assert Counter(self.reduced) == Counter(list(self.buckets))
        for unit_name in self.placements:
            if self.updates_a_slice(unit_name):
                assert self.params[unit_name] == "here"
                self.params[unit_name] = "stale"
        self.updated = True


@given(cases(specs() | specs(repeated_root=True)))
def test_every_program_can_be_carried_out_step_after_step(case: tuple[ModelSpec, Plan]) -> None:
    """Nothing computes without its parameters, and each gather, free, reduce and wait has its partner."""
    spec, plan = case
    program = build(spec, plan=plan)
    replay = Replay(spec, plan=plan, program=program)
    before = dict(replay.params)
    for _ in range(2):
        replay.start_step()
        for row in program.rows:
            for operation in row.operations:
                replay.do(operation)
            replay.happens(row.trigger, row.unit)
        assert replay.updated
        assert all(replay.num_backwards[unit.name] == replay.num_calls_back(unit.name) for unit in spec.units)
        assert replay.params == before
        assert replay.reduced == [bucket.name for bucket in program.buckets]
        has_buffers = any(unit.buffers for unit in spec.units)
        assert replay.num_broadcasts == (spec.call_order.count(ROOT) if has_buffers else 0)


@given(cases(specs()))
def test_the_rules_leave_their_state_as_they_found_it(case: tuple[ModelSpec, Plan]) -> None:
    """So the program of one step is that of every step."""
    spec, plan = case
    events, context = _events_and_context(spec, plan=plan, mesh=None, reduces=True)
    state = OURS.first_state(context)
    for event in events:
        state, _ = OURS.by_trigger[event.trigger](state, event, context)
    assert state == OURS.first_state(context)


def _whole(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Buckets with the pieces of a unit, which follow each other, put together."""
    found = []
    for _, group in groupby(buckets, key=lambda bucket: bucket.units):
        pieces = list(group)
        assert [piece.piece for piece in pieces] == list(range(pieces[0].num_pieces))
        found.append(replace(pieces[0], num_bytes=sum(piece.num_bytes for piece in pieces)))
    return found


@given(cases(specs()))
def test_buckets_partition_the_trainable_units_in_the_order_of_backward(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    placements = plan.placements(unit.name for unit in spec.units)
    called = [name for name in dict.fromkeys(spec.call_order) if spec.unit(name).backward != NONE][::-1]
    never_called = [unit.name for unit in spec.units if unit.name not in called]
    num_trainable = {
        unit.name: sum(param.num_elements for param in unit.params if param.trainable) for unit in spec.units
    }
    buckets = _whole(build(spec, plan=plan).buckets)
    assert [name for bucket in buckets for name in bucket.units] == [
        name for name in (*called, *never_called) if num_trainable[name]
    ]
    for bucket in buckets:
        assert len({placements[name] for name in bucket.units}) == 1
        assert bucket.num_bytes == 4 * sum(num_trainable[name] for name in bucket.units)
        if placements[bucket.units[0]].grads is SHARDED:
            assert len(bucket.units) == 1
        else:
            # It was still too small before the last one joined.
            assert 4 * sum(num_trainable[name] for name in bucket.units[:-1]) < plan.bucket_bytes
    for bucket, following in pairwise(buckets):
        placement = placements[bucket.units[0]]
        if placement == placements[following.units[0]] and placement.grads is REPLICATED:
            assert bucket.num_bytes >= plan.bucket_bytes


@given(specs(), st.sampled_from([name for name, row in STRATEGIES.items() if row.optim is REPLICATED]))
def test_where_all_is_replicated_nothing_is_gathered_or_freed(spec: ModelSpec, strategy: str) -> None:
    kinds = {operation.kind for operation in build(spec, plan=Plan(strategy=strategy)).operations()}
    assert not kinds & {Kind.GATHER, Kind.WAIT_GATHER, Kind.FREE}


@given(cases(specs()))
def test_no_two_rows_have_the_same_trigger_unit_and_call(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    program = build(spec, plan=plan)
    assert len({(row.trigger, row.unit, row.call) for row in program.rows}) == len(program.rows)


def most_gathered_ahead(spec: ModelSpec, *, plan: Plan, kind: Kind) -> int:
    """While anything computes: sharded units that are whole or arriving, less those that have to be.

    Those are the root, the units that run (with the units around them), and what forward keeps for backward: the
    units that are not resharded, and the last one.
    """
    program = build(spec, plan=plan)
    replay = Replay(spec, plan=plan, program=program)
    kept = {name for name, placement in replay.placements.items() if not placement.reshard_after_forward}
    most = 0
    for row in program.rows:
        for operation in row.operations:
            replay.do(operation)
            if operation.kind is kind:
                needed = {ROOT, *replay.running, *replay.going_back, *(kept & replay.called)}
                if kind is Kind.BACKWARD:
                    last = spec.call_order[-1]
                    needed |= {name for name in replay.placements if last == name or last.startswith(name + ".")}
                most = max(most, len(replay.whole() - needed))
        replay.happens(row.trigger, row.unit)
    return most


@given(cases(specs()))
def test_forward_gathers_at_most_prefetch_units_ahead(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    assert most_gathered_ahead(spec, plan=plan, kind=Kind.FORWARD) <= plan.prefetch


@given(cases(specs()))
def test_backward_gathers_at_most_prefetch_units_ahead(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    assert most_gathered_ahead(spec, plan=plan, kind=Kind.BACKWARD) <= plan.prefetch
