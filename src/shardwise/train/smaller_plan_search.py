"""A plan that ran out of memory → one that is predicted to need clearly less, with the same samples in each step.

A plan that keeps the passes of a step keeps all results. A plan that splits them (fewer samples in each of more
passes) gives the results of accumulation. A split is chosen if it is predicted to be faster, or if no other plan is
left.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.engine.out_of_memory.smaller_plan import keeps_passes
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, SpecFor, cost
from shardwise.planner.search.nearest import changes, fewest_on_host, host_units
from shardwise.planner.search.request import AutoRequest, NoPlanFits

# A smaller plan needs at most this share of the memory.
_LESS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerPlan:
    """`before` ran out of memory; `found` needs less. None: no plan does."""

    before: Candidate
    found: Candidate | None

    @property
    def cost(self) -> str:
        """The predicted cost of the change in a few words."""
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
class SmallerPlanSearch:
    """A search for smaller plans on one cluster.

    mesh     the mesh of each plan; None: any
    solves   as `auto` does; otherwise the smallest change of the plan is taken
    """

    spec_for: SpecFor
    cluster: Cluster
    optimizer: str
    goal: str
    mesh: Mesh | None
    solves: bool

    def run(self, plan: Plan) -> SmallerPlan:
        """Return the faster of a plan that keeps the passes and one that splits them; if speed is unknown, the first.

        A fixed plan is changed, an `auto` plan solved again with less memory.
        """
        before = self._cost(plan)
        budget = int(_LESS * before.memory.device_bytes)
        if self.solves:
            keeping, split = self._solve([plan], budget_bytes=budget), self._solve(_splits(plan), budget_bytes=budget)
        else:
            same = [changed for changed in changes(plan) if changed.precision == plan.precision]
            keeping, split = (
                self._first_fit(plan, (p for p in same if keeps_passes(p, of=plan) is keeps), budget_bytes=budget)
                for keeps in (True, False)
            )
        return SmallerPlan(before=before, found=_faster(keeping, split))

    def _solve(self, plans: Iterable[Plan], *, budget_bytes: int) -> Candidate | None:
        """Return the solver's answer for the first plan whose passes fit."""
        for plan in plans:
            request = AutoRequest(
                plan=replace(plan, mesh=self.mesh),
                cluster=self.cluster,
                optimizer=self.optimizer,
                budget_bytes=budget_bytes,
                goal=self.goal,
            )
            try:
                return solve_plan(self.spec_for, request=request).candidate
            except NoPlanFits:
                continue
        return None

    def _first_fit(self, before: Plan, plans: Iterable[Plan], *, budget_bytes: int) -> Candidate | None:
        """Return the first plan that fits, with as few units in host memory as that takes."""

        def fits(plan: Plan) -> bool:
            return self._cost(plan).memory.device_bytes <= budget_bytes

        plan = next(filter(fits, plans), None)
        if plan is None:
            return None
        return self._cost(fewest_on_host(plan, before=before, names=host_units(self.spec_for(plan)), fits=fits))

    def _cost(self, plan: Plan) -> Candidate:
        return cost(self.spec_for(plan), plan=plan, cluster=self.cluster, optimizer=self.optimizer)


def _splits(plan: Plan) -> list[Plan]:
    """Return plans with the same samples in more passes, the largest passes first."""
    assert plan.micro_batch is not None
    return [
        replace(plan, micro_batch=plan.micro_batch // times, accumulate=plan.accumulate * times)
        for times in range(2, plan.micro_batch + 1)
        if plan.micro_batch % times == 0
    ]


def _faster(keeping: Candidate | None, split: Candidate | None) -> Candidate | None:
    if keeping is None or split is None:
        return keeping or split
    if keeping.time is None or split.time is None:
        return keeping
    return split if split.time.samples_per_s > keeping.time.samples_per_s else keeping
