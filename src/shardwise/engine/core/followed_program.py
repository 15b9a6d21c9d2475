"""The program that a core follows. The first step finds out in which order the units are called (first_forward.py)."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from shardwise.base.errors import InvalidModel
from shardwise.comm.groups.agreement import distinct, meet
from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.evaluation_gathers import EvaluationGathers
from shardwise.engine.core.executor import EngineExecutor
from shardwise.engine.core.first_forward import FirstForward, Observation, learned
from shardwise.engine.core.unit import Unit
from shardwise.plan import Plan
from shardwise.program import StepProgram, build, context_of
from shardwise.program.rules.demand import agreed
from shardwise.program.rules.learning import LEARNING
from shardwise.program.run import Cursor
from shardwise.program.spec import ModelSpec


class FollowedProgram:
    """The program of a spec, as the steps have shown it, under a plan.

    plan             the user's, with the matrices that optimizers need unsharded
    cursor           the place in the program; `evaluation`: in forwards that are no part of it
    seen             what the ranks saw in the first step; nothing until it is over
    any_sharded      whether parameters of any unit are sharded
    limit_seconds    how long this rank waits for the others where it leaves the program, or a user calls it alone
    """

    def __init__(self, units: dict[str, Unit], *, broadcast_buffers: Callable[[], None], setting: CoreSetting) -> None:
        self.units, self._setting = units, setting
        self.executor = EngineExecutor(units, broadcast_buffers=broadcast_buffers, serve=self.serve, setting=setting)
        self.cursor = Cursor(self.executor)
        self.evaluation = EvaluationGathers(
            self.executor, group=setting.groups.gather, run=self.cursor.run, make_first_forward=self._make_first_forward
        )
        self.limit_seconds = 60.0
        self.seen: Sequence[Observation] = ()
        self.follow(setting.spec, plan=setting.plan)

    @property
    def learned(self) -> bool:
        """Return whether the order of the units is known."""
        return bool(self.seen)

    @property
    def generates_together(self) -> bool:
        """Return whether a rank that is done with its part of an evaluation has to continue until all ranks are."""
        return self.any_sharded and self.evaluation.agreed is None

    def follow(self, spec: ModelSpec, *, plan: Plan) -> None:
        """Follow this spec from here on, under this plan of the same placements."""
        self.spec, self.plan = spec, plan
        self.any_sharded = any(unit.sharded for unit in self.units.values())
        self.context = context_of(spec, plan=plan, mesh=self._setting.groups.mesh)
        self.evaluation.follow(self.context, dynamic=plan.dynamic)
        self.cursor.follow(self.build())

    def build(self, *, reduces: bool = True) -> StepProgram:
        """Return the program; of a pass that keeps its gradients, unless it `reduces`."""
        program = build(self.spec, plan=self.plan, mesh=self._setting.groups.mesh, reduces=reduces)
        if reduces:
            self.executor.hold_buckets(
                ReduceBucket(bucket, units=[self.units[name] for name in bucket.units], setting=self._setting)
                for bucket in program.buckets
            )
        return program

    def serve(self, unit: Unit) -> None:
        """Gather a unit that the program has not gathered: on all ranks, or not at all."""
        if not unit.whole:
            what = f"a gather of {unit.name} that the first step had no place for (dynamic = true agrees on each)"
            meet(what, limit_seconds=self.limit_seconds)
            self.cursor.run(agreed(unit.name, self.context))
        unit.wait_gather()
        if unit.at_rest:
            unit.wake()

    def gather_again(self) -> None:
        """Begin a backward of forwards that one has gone back through: gather what that one found gathered."""
        self.cursor.rewind()
        found = self.cursor.program.gathered_after_forward()
        for unit in self.units.values():
            if unit.sharded and unit.name in found:
                self.cursor.run(agreed(unit.name, self.context))

    # The order of the units

    def begin_forward(self) -> None:
        """Learn the order and what is reduced: in a first step, or after parameters were frozen or thawed."""
        changed = any(unit.grads.expected != unit.learned_trainable for unit in self.units.values())
        if self.learned and not changed and not self.plan.dynamic:
            self.executor.observe(None)
            return
        if self.learned and changed:
            if self.executor.holds_grads:
                raise InvalidModel("parameters were frozen or thawed in the middle of an accumulation: do it after it")
            meet("a step before which parameters were frozen or thawed", limit_seconds=self.limit_seconds)
        self.seen = ()
        first = self._make_first_forward(before=self.executor.first)
        self.executor.observe(first)
        # How backward will come to a unit is noted as its forward ends.
        self.cursor.learn(LEARNING, replace(self.context, backward=first.backward))

    def _make_first_forward(self, before: FirstForward | None = None) -> FirstForward:
        words = partial(distinct, group=self._setting.groups.gather)
        return FirstForward(self.units, context=self.context, distinct=words, run=self.cursor.run, before=before)

    def learn(self, first: FirstForward) -> None:
        """Take the calls of the first forward, which is over on all ranks, as the program's order."""
        self.executor.end_first_forward()
        self.seen = distinct(own := first.end(), text=own.text)
        # What was gathered so far the ranks of a group have agreed on, each group by itself.
        self._setting.groups.gather.log.restart()
        self.executor.observe(None)
        self._follow_seen({name for unit in self.units.values() for name in unit.learn_trained()})
        self.cursor.learned(places=first.places_in(self.spec.call_order))
        self.cursor.run(first.catch_up(self.cursor.program, seen=self.seen))

    def _follow_seen(self, trainable: AbstractSet[str]) -> None:
        """Follow the program of what was seen; `trainable`: the parameters that are trained now."""
        sharded = [unit.name for unit in self.units.values() if unit.sharded]
        spec = learned(self.spec, seen=self.seen, sharded=sharded, trainable=trainable)
        self.follow(spec, plan=self.plan)

    def relearn(self, spec: ModelSpec) -> None:
        """Follow a spec whose units hold other buffers: the next step is a first one."""
        self.seen = ()
        self.executor.cover()
        self.follow(spec, plan=self.plan)

    def resume(self, before: "FollowedProgram") -> None:
        """Continue where the program of another plan has stopped, between two passes. Both have the same parameters."""
        self.limit_seconds = before.limit_seconds
        if before.learned and not self.plan.dynamic:
            self.seen = before.seen
            self._follow_seen({name for one in self.units.values() for name in one.resume(before.units[one.name])})
