"""The plan that a run has: the config's; with `plan.strategy = "auto"`, as an earlier start chose, or chosen now.

auto.json in the run folder holds what was asked, of which devices, and the plan that was chosen; the memory that is
predicted for it, and, once a step was rehearsed, the measured one (memory_probe.py). A start that asks the
same uses that plan; with another question, other devices or another number of them, it is chosen again. `--replan`
chooses again in any case, also where the config's plan is a fixed one: a step keeps its number of samples.
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
from shardwise.train.run_folder import samples_of_step
from shardwise.train.what_fits import optimizer_rule

FILE = "auto.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """The config with its plan, and as it was given; on rank 0 of an auto run, what auto.json is to hold.

    `source`: the model as the planner sees it, once it was asked for; plans that are solved later trace nothing again.
    """

    config: TrainConfig
    given: TrainConfig
    record: dict[str, Any] | None = None
    source: Source | None = None

    @property
    def sentence(self) -> str:
        """What the solver chose; "" where it was not asked, and on other ranks than 0."""
        return "" if self.record is None else str(self.record["said"])

    def note(self) -> None:
        """Write it down for the next start; to be called when the folder is the run's."""
        if self.record is not None:
            with atomic_write(self.config.folder / FILE) as file:
                file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def may_capture(self, device: torch.device) -> bool:
        """Whether steps may be captured on this device."""
        return device.type == "cuda" and self.given.plan.capture != "off"

    @property
    def predicted_bytes(self) -> int | None:
        """Of the memory that a rank allocates; None where it is not known, and on other ranks than 0."""
        return None if self.record is None else self.record.get("predicted_bytes")

    @property
    def outside_bytes(self) -> int | None:
        """What is predicted to be held on the device besides tensors; None where nothing was solved."""
        return None if self.record is None else self.record.get("outside_bytes")

    @property
    def is_measured(self) -> bool:
        """Whether a step of the plan has been rehearsed."""
        return self.record is not None and "measured_bytes" in self.record

    @property
    def ran_out(self) -> bool:
        """Whether it is in the place of a larger plan that ran out of memory."""
        return self.record is not None and "ran_out" in self.record

    def with_plan(self, plan: Plan) -> "ChosenPlan":
        """On another rank than 0, which has no more to know of it."""
        return replace(self, config=replace(self.config, plan=plan))

    def measured(self, num_bytes: int) -> "ChosenPlan":
        """A step of the plan was rehearsed, with this peak: a later start need not do it again."""
        if self.record is None:
            return self
        return replace(self, record={**self.record, "measured_bytes": num_bytes})

    def replaced(self, plan: Plan, *, place: Place, predicted_bytes: int | None) -> "ChosenPlan":
        """The run continues under another plan, and so does a later start that asks the same."""
        asked = _asked(self.given, cluster=job_cluster(place.device, num_ranks=place.num_ranks))
        said = f"{plan.strategy}, recompute {plan.recompute}: an earlier plan ran out of memory"
        record = {
            "asked": asked,
            "plan": plan.to_dict(),
            "said": said,
            "predicted_bytes": predicted_bytes,
            "outside_bytes": self.outside_bytes,
            "ran_out": True,
        }
        return replace(self, config=replace(self.config, plan=plan), record=record)


def choose_plan(config: TrainConfig, *, place: Place, fresh: bool, replan: bool = False) -> ChosenPlan:
    """Collective: rank 0 chooses, and all ranks get its plan. A fixed plan that nobody has replanned stays as it is."""
    # Ranks that are started again after a failure continue as they did.
    first = place.restarts == 0
    chooses = config.plan.is_auto or (replan and first)
    record: dict[str, Any] | None = None
    source: Source | None = None

    def choose() -> Plan:
        nonlocal record, source
        if chooses or (config.folder / FILE).exists():
            cluster = job_cluster(place.device, num_ranks=place.num_ranks)
            asked = _asked(config, cluster=cluster)
            record = None if (fresh or replan) and first else _kept(config.folder, asked)
            if record is None and chooses:
                source = source_of(config, cluster=cluster)
                record = _solved(config, source, cluster=cluster, budget_bytes=config.auto.budget_bytes)
        return config.plan if record is None else Plan.from_dict(record["plan"])

    plan = solved_by_rank_0(choose)
    return ChosenPlan(config=replace(config, plan=plan), given=config, record=record, source=source)


def solve_again(chosen: ChosenPlan, *, place: Place, budget_bytes: int) -> ChosenPlan:
    """On rank 0: the same question with another budget; what is compiled stays so. NoPlanFits, if nothing does."""
    cluster = job_cluster(place.device, num_ranks=place.num_ranks)
    source = chosen.source or source_of(chosen.config, cluster=cluster)
    given = replace(chosen.given, plan=replace(chosen.given.plan, compile=chosen.config.plan.compile))
    found = _solved(given, source, cluster=cluster, budget_bytes=budget_bytes)
    record = {**found, "asked": _asked(chosen.given, cluster=cluster)}
    config = replace(chosen.config, plan=Plan.from_dict(record["plan"]))
    return replace(chosen, config=config, record=record, source=source)


def source_of(config: TrainConfig, *, cluster: Cluster) -> Source:
    """A config's model, for the planner."""
    task = config.task
    return Source(task.model, seq=task.seq, image=task.image, kernels=_kind(cluster))


def _kind(cluster: Cluster) -> str:
    return "cpu" if cluster.device.name == "cpu" else "cuda"


def _solved(config: TrainConfig, source: Source, *, cluster: Cluster, budget_bytes: int | None) -> dict[str, Any]:
    """What auto.json is to hold."""
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
    """What is given, and the samples of a step: of a fixed plan, as many as the run had."""
    if config.plan.is_auto:
        return config.plan, config.auto.global_batch
    before = samples_of_step(config.folder)
    if before is None:
        assert config.plan.micro_batch is not None
        before = config.plan.micro_batch * config.plan.accumulate * cluster.num_ranks
    given = replace(config.plan, mesh=None, micro_batch=None, accumulate=1)
    return given, config.auto.global_batch or before


def _asked(config: TrainConfig, *, cluster: Cluster) -> dict[str, Any]:
    """All that the plan follows from, in JSON's own types."""
    sections = config.to_dict()
    # Whether it is rehearsed does not change what is asked.
    del sections["auto"]["probe"]
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
