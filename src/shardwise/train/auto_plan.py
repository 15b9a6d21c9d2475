"""The plan that a run has: the config's; with `plan.strategy = "auto"`, as an earlier start chose, or chosen now.

auto.json in the run folder holds what was asked, of which devices, and the plan that was chosen. A start that asks the
same uses that plan; with another question, other devices or another number of them, it is chosen again. `--replan`
chooses again in any case, also where the config's plan is a fixed one: a step keeps its number of samples.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.atomic import atomic_write
from shardwise.automatic import job_cluster, solved_by_rank_0
from shardwise.comm.join import Place
from shardwise.errors import InvalidPlan
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.planner.search.auto import AutoRequest, solve_plan
from shardwise.planner.search.candidates import capacity_bytes
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.sources import Source
from shardwise.train.config import TrainConfig
from shardwise.train.run_folder import samples_of_step
from shardwise.train.what_fits import optimizer_rule

FILE = "auto.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """The config with its plan, and as it was given; on rank 0 of an auto run, what auto.json is to hold."""

    config: TrainConfig
    given: TrainConfig
    record: dict[str, Any] | None = None

    @property
    def sentence(self) -> str:
        """What the solver chose; "" where it was not asked, and on other ranks than 0."""
        return "" if self.record is None else str(self.record["said"])

    def note(self) -> None:
        """Write it down for the next start; to be called when the folder is the run's."""
        if self.record is not None:
            with atomic_write(self.config.folder / FILE) as file:
                file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def replaced(self, plan: Plan, *, place: Place) -> "ChosenPlan":
        """The run continues under another plan, and so does a later start that asks the same."""
        asked = _asked(self.given, cluster=job_cluster(place.device, num_ranks=place.num_ranks))
        said = f"{plan.strategy}, recompute {plan.recompute}: an earlier plan ran out of memory"
        record = {"asked": asked, "plan": plan.to_dict(), "said": said}
        return replace(self, config=replace(self.config, plan=plan), record=record)


def choose_plan(config: TrainConfig, *, place: Place, fresh: bool, replan: bool = False) -> ChosenPlan:
    """Collective: rank 0 chooses, and all ranks get its plan. A fixed plan that nobody has replanned stays as it is."""
    # Ranks that are started again after a failure continue as they did.
    first = place.restarts == 0
    chooses = config.plan.is_auto or (replan and first)
    record: dict[str, Any] | None = None

    def choose() -> Plan:
        nonlocal record
        if chooses or (config.folder / FILE).exists():
            cluster = job_cluster(place.device, num_ranks=place.num_ranks)
            asked = _asked(config, cluster=cluster)
            record = None if (fresh or replan) and first else _kept(config.folder, asked)
            if record is None and chooses:
                solver = _Solver(config=config, cluster=cluster)
                plan = solver.solve()
                record = {"asked": asked, "plan": plan.to_dict(), "said": solver.said}
        return config.plan if record is None else Plan.from_dict(record["plan"])

    plan = solved_by_rank_0(choose)
    return ChosenPlan(config=replace(config, plan=plan), given=config, record=record)


@dataclass(slots=True, kw_only=True)
class _Solver:
    """`said`: what was chosen, in one sentence."""

    config: TrainConfig
    cluster: Cluster
    said: str = ""

    def solve(self) -> Plan:
        config, kind = self.config, "cpu" if self.cluster.device.name == "cpu" else "cuda"
        source = Source(config.task.model, seq=config.task.seq, image=config.task.image, kernels=kind)
        plan, global_batch = self._question()
        request = AutoRequest(
            plan=plan,
            cluster=self.cluster,
            optimizer=optimizer_rule(config.optimizer, device=kind),
            budget_bytes=config.auto.budget_bytes,
            global_batch=global_batch,
            goal=config.auto.goal,
        )
        plan = solve_plan(source.spec_for, request=request).candidate.plan
        self.said = chosen_text(plan, names=[unit.name for unit in source.spec_for(plan).units])
        return plan

    def _question(self) -> tuple[Plan, int | None]:
        """What is given, and the samples of a step: of a fixed plan, as many as the run had."""
        config = self.config
        if config.plan.is_auto:
            return config.plan, config.auto.global_batch
        before = samples_of_step(config.folder)
        if before is None:
            assert config.plan.micro_batch is not None
            before = config.plan.micro_batch * config.plan.accumulate * self.cluster.num_ranks
        given = replace(config.plan, mesh=None, micro_batch=None, accumulate=1)
        return given, config.auto.global_batch or before


def _asked(config: TrainConfig, *, cluster: Cluster) -> dict[str, Any]:
    """All that the plan follows from, in JSON's own types."""
    sections = config.to_dict()
    asked = {
        **{name: sections[name] for name in ("plan", "auto", "optimizer", "task")},
        "cluster": str(cluster),
        "capacity_bytes": capacity_bytes(cluster),
    }
    found: dict[str, Any] = json.loads(json.dumps(asked))
    return found


def _kept(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier start chose, if it asked the same and the file is whole."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        Plan.from_dict(found["plan"])
        return found if found["asked"] == asked and isinstance(found["said"], str) else None
    except (OSError, ValueError, KeyError, TypeError, InvalidPlan):
        return None
