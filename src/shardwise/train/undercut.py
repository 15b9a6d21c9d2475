"""A plan that ran out of memory → one that is predicted to need clearly less, with the same samples in each step.

Either the passes of a step stay as they are, and the plan changes around them; then all results stay as they are, too.
Or a pass is split: fewer samples in each of more passes, and the results are those of accumulation. That is done if it
is predicted to be faster, or if nothing else is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.engine.out_of_memory.smaller_plan import keeps_passes
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.search.auto import AutoRequest, NoPlanFits, solve_plan
from shardwise.planner.search.candidates import Candidate, SpecFor, cost
from shardwise.planner.search.nearest import changes

# What a plan must at least be undercut by.
_LESS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Undercut:
    """`before` ran out; `found` needs less. None: nothing does."""

    before: Candidate
    found: Candidate | None

    @property
    def cost(self) -> str:
        """What is predicted of it, in a few words."""
        before, found = self.before, self.found
        assert found is not None
        passes = ""
        if found.batch != before.batch:
            passes = f"the same samples in {found.plan.accumulate} passes instead of {before.plan.accumulate}; "
        share = found.memory.device_bytes / before.memory.device_bytes
        memory = f"{passes}predicted {share:.2f} × the memory"
        if before.time is None or found.time is None:
            return f"{memory}, "
        return f"{memory} and {found.time.samples_per_s / before.time.samples_per_s:.2f} × the speed, "


@dataclass(frozen=True, slots=True, kw_only=True)
class Undercutting:
    """Where plans are looked for. `mesh`: the given one, None: any. `solves`: as `auto` does, else change by change."""

    spec_for: SpecFor
    cluster: Cluster
    optimizer: str
    goal: str
    mesh: Mesh | None
    solves: bool

    def of(self, plan: Plan) -> Undercut:
        """The faster of one that keeps the passes and one that splits them; where speed is unknown, the first."""
        before = self._cost(plan)
        most = int(_LESS * before.memory.device_bytes)
        keeping = self._first([plan], most=most) if self.solves else self._nearest(plan, most=most, splits=False)
        split = self._first(_splits(plan), most=most) if self.solves else self._nearest(plan, most=most, splits=True)
        return Undercut(before=before, found=_better(keeping, split))

    def _first(self, plans: list[Plan], *, most: int) -> Candidate | None:
        """The solver's answer for the first of these whose passes fit."""
        for plan in plans:
            given = replace(plan, mesh=self.mesh)
            request = AutoRequest(
                plan=given, cluster=self.cluster, optimizer=self.optimizer, budget_bytes=most, goal=self.goal
            )
            try:
                return solve_plan(self.spec_for, request=request).candidate
            except NoPlanFits:
                continue
        return None

    def _nearest(self, plan: Plan, *, most: int, splits: bool) -> Candidate | None:
        """The smallest change of a fixed plan that fits."""
        for changed in _changes(plan):
            if keeps_passes(changed, of=plan) is not splits:
                found = self._cost(changed)
                if found.memory.device_bytes <= most:
                    return found
        return None

    def _cost(self, plan: Plan) -> Candidate:
        return cost(self.spec_for(plan), plan=plan, cluster=self.cluster, optimizer=self.optimizer)


def _changes(plan: Plan) -> Iterator[Plan]:
    return (changed for changed in changes(plan) if changed.precision == plan.precision)


def _splits(plan: Plan) -> list[Plan]:
    """The same samples in more passes: of half the size first, if that is a whole number."""
    assert plan.micro_batch is not None
    return [
        replace(plan, micro_batch=plan.micro_batch // times, accumulate=plan.accumulate * times)
        for times in range(2, plan.micro_batch + 1)
        if plan.micro_batch % times == 0
    ]


def _better(keeping: Candidate | None, split: Candidate | None) -> Candidate | None:
    if keeping is None or split is None:
        return keeping or split
    if keeping.time is None or split.time is None:
        return keeping
    return split if split.time.samples_per_s > keeping.time.samples_per_s else keeping
