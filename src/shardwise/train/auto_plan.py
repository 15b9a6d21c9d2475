"""The plan of a run: the config's own, or, with `plan.strategy = "auto"`, one that is solved and kept in auto.json.

auto.json in the run folder holds the question, the devices, the chosen plan, its predicted memory and, after a
rehearsal, the measured one (memory_probe.py). A later start with the same question uses that plan; another question,
other devices or another number of them solve again. `--replan` solves again in any case, also for a fixed plan: a step
keeps its number of samples.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.join import Place
from shardwise.errors import InvalidPlan
from shardwise.files.atomic import atomic_write
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.planner.search.auto import AutoRequest, solve_plan
from shardwise.planner.search.candidates import capacity_bytes
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.sources import Source
from shardwise.train.automatic import job_cluster, solved_by_rank_0
from shardwise.train.config import TrainConfig
from shardwise.train.fitting_plan import optimizer_rule
from shardwise.train.run_folder import AUTO, samples_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A config with its plan.

    given    the config before a plan was chosen
    record   the content of auto.json; only on rank 0 of an auto run
    source   the model as the planner sees it, if it was traced; later searches reuse it
    """

    config: TrainConfig
    given: TrainConfig
    record: dict[str, Any] | None = None
    source: Source | None = None

    def _recorded(self, name: str) -> Any:
        return None if self.record is None else self.record.get(name)

    @property
    def sentence(self) -> str:
        """The solver's choice in words; "" if nothing was solved, and on other ranks than 0."""
        return self._recorded("said") or ""

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted memory that a rank allocates; None if it is not known, and on other ranks than 0."""
        found: int | None = self._recorded("predicted_bytes")
        return found

    @property
    def outside_bytes(self) -> int | None:
        """The predicted memory of the device that is not tensors; None if nothing was solved."""
        found: int | None = self._recorded("outside_bytes")
        return found

    @property
    def is_measured(self) -> bool:
        """Whether a step of the plan has been rehearsed."""
        return self._recorded("measured_bytes") is not None

    @property
    def ran_out(self) -> bool:
        """Whether the plan replaces a larger one that ran out of memory."""
        return self._recorded("ran_out") is not None

    def save(self) -> None:
        """Write auto.json, once the folder belongs to the run."""
        if self.record is not None:
            with atomic_write(self.config.folder / AUTO) as file:
                file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def may_capture(self, device: torch.device) -> bool:
        """Whether steps may be captured on this device."""
        return device.type == "cuda" and self.given.plan.capture != "off"

    def with_plan(self, plan: Plan) -> "ChosenPlan":
        return replace(self, config=replace(self.config, plan=plan))

    def measured(self, num_bytes: int) -> "ChosenPlan":
        """Record the peak of a rehearsal, so that a later start need not repeat it."""
        return self if self.record is None else replace(self, record={**self.record, "measured_bytes": num_bytes})

    def replaced(self, plan: Plan, *, place: Place, predicted_bytes: int | None) -> "ChosenPlan":
        """Replace a plan that ran out of memory, for this run and for later starts with the same question."""
        record = {
            "asked": _asked(self.given, cluster=job_cluster(place.device, num_ranks=place.num_ranks)),
            "plan": plan.to_dict(),
            "said": f"{plan.strategy}, recompute {plan.recompute}: an earlier plan ran out of memory",
            "predicted_bytes": predicted_bytes,
            "outside_bytes": self.outside_bytes,
            "ran_out": True,
        }
        return replace(self.with_plan(plan), record=record)


def choose_plan(config: TrainConfig, *, place: Place, fresh: bool, replan: bool = False) -> ChosenPlan:
    """Return the plan of this run on every rank, chosen by rank 0; a fixed plan stays unless `replan`. Collective."""
    # Ranks that are restarted after a failure keep their plan.
    first = place.restarts == 0
    chooses = config.plan.is_auto or (replan and first)
    record: dict[str, Any] | None = None
    source: Source | None = None

    def choose() -> Plan:
        nonlocal record, source
        if chooses or (config.folder / AUTO).exists():
            cluster = job_cluster(place.device, num_ranks=place.num_ranks)
            record = None if (fresh or replan) and first else _kept(config.folder, _asked(config, cluster=cluster))
            if record is None and chooses:
                source = source_of(config, cluster=cluster)
                record = _solve(config, source, cluster=cluster, budget_bytes=config.auto.budget_bytes)
        return config.plan if record is None else Plan.from_dict(record["plan"])

    plan = solved_by_rank_0(choose)
    return ChosenPlan(config=replace(config, plan=plan), given=config, record=record, source=source)


def solve_again(chosen: ChosenPlan, *, place: Place, budget_bytes: int) -> ChosenPlan:
    """Answer the same question with another budget, on rank 0; `compile` stays. NoPlanFits, if no plan does."""
    cluster = job_cluster(place.device, num_ranks=place.num_ranks)
    source = chosen.source or source_of(chosen.config, cluster=cluster)
    given = replace(chosen.given, plan=replace(chosen.given.plan, compile=chosen.config.plan.compile))
    found = _solve(given, source, cluster=cluster, budget_bytes=budget_bytes)
    record = {**found, "asked": _asked(chosen.given, cluster=cluster)}
    return replace(chosen.with_plan(Plan.from_dict(record["plan"])), record=record, source=source)


def source_of(config: TrainConfig, *, cluster: Cluster) -> Source:
    """Return a config's model for the planner."""
    task = config.task
    return Source(task.model, seq=task.seq, image=task.image, kernels=_kind(cluster))


def _kind(cluster: Cluster) -> str:
    return "cpu" if cluster.device.name == "cpu" else "cuda"


def _solve(config: TrainConfig, source: Source, *, cluster: Cluster, budget_bytes: int | None) -> dict[str, Any]:
    """Solve the config's question; return the content of auto.json."""
    given, global_batch = _question(config, cluster=cluster)
    request = AutoRequest(
        plan=given,
        cluster=cluster,
        optimizer=optimizer_rule(config.optimizer, device=_kind(cluster)),
        budget_bytes=budget_bytes,
        global_batch=global_batch,
        goal=config.auto.goal,
    )
    found = solve_plan(source.spec_for, request=request).candidate
    names = [unit.name for unit in source.spec_for(found.plan).units]
    source.release()
    return {
        "asked": _asked(config, cluster=cluster),
        "plan": found.plan.to_dict(),
        "said": chosen_text(found.plan, names=names),
        "predicted_bytes": found.memory.allocated_bytes,
        "outside_bytes": found.memory.device_bytes - found.memory.reserved_bytes,
    }


def _question(config: TrainConfig, *, cluster: Cluster) -> tuple[Plan, int | None]:
    """Return the given settings and the samples of a step; a fixed plan keeps the samples that the run had."""
    if config.plan.is_auto:
        return config.plan, config.auto.global_batch
    before = samples_of_step(config.folder)
    if before is None:
        assert config.plan.micro_batch is not None
        before = config.plan.micro_batch * config.plan.accumulate * cluster.num_ranks
    given = replace(config.plan, mesh=None, micro_batch=None, accumulate=1)
    return given, config.auto.global_batch or before


def _asked(config: TrainConfig, *, cluster: Cluster) -> dict[str, Any]:
    """Return all that the plan follows from, in JSON's own types."""
    sections = config.to_dict()
    # A rehearsal does not change the question.
    del sections["auto"]["probe"]
    asked = {name: sections[name] for name in ("plan", "auto", "optimizer", "task")}
    found: dict[str, Any] = json.loads(
        json.dumps({**asked, "cluster": str(cluster), "capacity_bytes": capacity_bytes(cluster)})
    )
    return found


def _kept(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return an earlier start's auto.json, if its question was the same and the file is valid."""
    try:
        found: dict[str, Any] = json.loads((folder / AUTO).read_text(encoding="utf-8"))
        Plan.from_dict(found["plan"])
        return found if found["asked"] == asked and isinstance(found["said"], str) else None
    except (OSError, ValueError, KeyError, TypeError, InvalidPlan):
        return None
