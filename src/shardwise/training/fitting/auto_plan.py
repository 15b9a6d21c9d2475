"""The plan of a run: the config's own, or, with `plan.strategy = "auto"`, one that is solved and kept in auto.json.

auto.json in the run folder holds the question, the devices, the chosen plan, its predicted memory and, after a
rehearsal, the measured one (memory_probe.py). A later start with the same question uses that plan; another question,
other devices or another number of them solve again. `--replan` solves again in any case, also for a fixed plan: a step
keeps its number of samples.

A rank that runs out of memory notes it there too (ran_out.py), whether the plan was solved or fixed. The next start
takes a smaller plan, which rank 0 finds, and later ones keep it.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import InvalidPlan
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, parse_json, read_json
from shardwise.comm.groups.agreement import exchange
from shardwise.comm.job.join import Place
from shardwise.hardware import Cluster
from shardwise.hardware.cluster import capacity_bytes
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.planner.search.nearest import cost_of_change, find_smaller
from shardwise.planner.search.request import AutoRequest, NoPlanFits
from shardwise.training.config.config import TrainConfig
from shardwise.training.fitting.automatic import job_cluster, solved_by_rank_0
from shardwise.training.fitting.memory_advice import optimizer_rule
from shardwise.training.run_folder import AUTO, samples_of_step

_RESTARTS_IF_AUTO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A config with its plan.

    given    the config before a plan was chosen
    record   the content of auto.json; only on rank 0 of an auto run
    model    the model as the planner sees it, if it was traced; later searches reuse it
    """

    config: TrainConfig
    given: TrainConfig
    place: Place
    record: dict[str, Any] | None = None
    model: Model | None = None

    @property
    def cluster(self) -> Cluster:
        return job_cluster(self.place.device, num_ranks=self.place.num_ranks)

    @property
    def optimizer(self) -> str:
        """The planner's rule for the optimizer."""
        return optimizer_rule(self.config.optimizer, device=self.place.device.type)

    @property
    def may_capture(self) -> bool:
        return self.place.device.type == "cuda" and self.given.plan.captures

    def recorded(self, name: str) -> Any:
        """Return an entry of auto.json; None if there is none, and on other ranks than 0.

        said              the choice in words
        predicted_bytes   the predicted memory that a rank allocates; outside_bytes: the rest of the device's memory
        measured_bytes    the peak of a rehearsal
        ran_out           how many plans of the run have run out of memory
        failed            how this one did, in one line; the next start takes a smaller one
        """
        return None if self.record is None else self.record.get(name)

    def save(self) -> None:
        """Write auto.json, once the folder belongs to the run."""
        if self.record is not None:
            with atomic_write(self.config.folder / AUTO) as file:
                file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def with_plan(self, plan: Plan) -> "ChosenPlan":
        return replace(self, config=replace(self.config, plan=plan))

    def with_record(self, record: dict[str, Any]) -> "ChosenPlan":
        return replace(self.with_plan(Plan.from_dict(record["plan"])), record=record)

    def measured(self, num_bytes: int) -> "ChosenPlan":
        """Record the peak of a rehearsal, so that a later start need not repeat it."""
        return self if self.record is None else replace(self, record={**self.record, "measured_bytes": num_bytes})

    def note_ran_out(self, failed: str) -> bool:
        """Note in auto.json that the plan ran out of memory, on any rank; False if no smaller plan is allowed."""
        asked, most = self.asked(), self.given.train.survive
        if most is None:
            most = _RESTARTS_IF_AUTO if self.given.plan.is_auto else 0
        # The record is on rank 0, and a rehearsal may have replaced the plan.
        record = _kept(self.config.folder, asked) or {"asked": asked, "plan": self.config.plan.to_dict(), "said": ""}
        count = record.get("ran_out", 0)
        if "failed" not in record:
            if count >= most:
                return False
            replace(self, record={**record, "failed": failed, "ran_out": count + 1}).save()
        return True

    def smaller(self) -> "ChosenPlan":
        """Replace the plan that ran out of memory by a smaller one, on rank 0; NoPlanFits, if there is none."""
        model, failed = self.traced(), self.recorded("failed")
        given = self.given
        request = self._request(given.plan, global_batch=given.auto.global_batch, budget_bytes=None)
        before, found = find_smaller(model.spec_for, plan=self.config.plan, request=request)
        model.release()
        if found is None:
            raise NoPlanFits(
                f"{failed}, and no plan with the same samples per step needs less: take more devices, a smaller model "
                f"or input, or remove {self.config.folder / AUTO} to try the same plan again"
            )
        record = {
            "asked": self.asked(),
            "plan": found.plan.to_dict(),
            "said": f"{failed}; since then {cost_of_change(before, found)}",
            "predicted_bytes": found.memory.allocated_bytes,
            "outside_bytes": self.recorded("outside_bytes"),
            "ran_out": self.recorded("ran_out"),
        }
        return replace(self.with_record(record), model=model)

    def traced(self) -> Model:
        """Return the model for the planner."""
        return self.model or self.config.task.named(kernels=self.place.device.type)

    def solved(self, *, budget_bytes: int | None) -> "ChosenPlan":
        """Solve the given question, on rank 0; `compile` stays as it is. NoPlanFits, if no plan does."""
        model = self.traced()
        given, global_batch = self._question()
        request = self._request(given, global_batch=global_batch, budget_bytes=budget_bytes)
        found = solve_plan(model.spec_for, request=request).candidate
        names = [unit.name for unit in model.spec_for(found.plan).units]
        model.release()
        record = {
            "asked": self.asked(),
            "plan": found.plan.to_dict(),
            "said": chosen_text(found.plan, names=names),
            "predicted_bytes": found.memory.allocated_bytes,
            "outside_bytes": found.memory.device_bytes - found.memory.reserved_bytes,
        }
        return replace(self.with_record(record), model=model)

    def _request(self, given: Plan, *, global_batch: int | None, budget_bytes: int | None) -> AutoRequest:
        return AutoRequest(
            plan=replace(given, compile=self.config.plan.compile),
            cluster=self.cluster,
            optimizer=self.optimizer,
            budget_bytes=budget_bytes,
            global_batch=global_batch,
            goal=self.given.auto.goal,
        )

    def _question(self) -> tuple[Plan, int | None]:
        """Return the given settings and the samples of a step; a fixed plan keeps the samples that the run had."""
        given, global_batch = self.given.plan, self.given.auto.global_batch
        if given.is_auto:
            return given, global_batch
        before = samples_of_step(self.given.folder)
        if before is None:
            assert given.micro_batch is not None
            before = given.micro_batch * given.accumulate * self.place.num_ranks
        return replace(given, mesh=None, across=ACROSS[0], micro_batch=None, accumulate=1), global_batch or before

    def asked(self) -> dict[str, Any]:
        """Return all that the plan follows from, in JSON's own types."""
        sections = self.given.to_dict()
        # A rehearsal does not change the question.
        del sections["auto"]["probe"]
        asked: dict[str, Any] = {name: sections[name] for name in ("plan", "auto", "optimizer", "task")}
        cluster = self.cluster
        asked |= {
            "cluster": str(cluster),
            "capacity_bytes": capacity_bytes(cluster),
            "expands_segments": cluster.expands_segments,
        }
        found: dict[str, Any] = parse_json(json.dumps(asked))
        return found


def choose_plan(config: TrainConfig, *, place: Place, fresh: bool, replan: bool = False) -> ChosenPlan:
    """Return the plan of this run on every rank, chosen by rank 0; a fixed plan stays unless `replan`. Collective."""
    # Ranks that are restarted after a failure keep their plan.
    first = place.restarts == 0
    chooses = config.plan.is_auto or (replan and first)
    chosen = ChosenPlan(config=config, given=config, place=place)

    def choose() -> Plan:
        nonlocal chosen
        if chooses or (config.folder / AUTO).exists():
            record = None if (fresh or replan) and first else _kept(config.folder, chosen.asked())
            if record is not None:
                chosen = chosen.with_record(record)
                if "failed" in record:
                    chosen = chosen.smaller()
            elif chooses:
                chosen = chosen.solved(budget_bytes=config.auto.budget_bytes)
        return chosen.config.plan

    plan = solved_by_rank_0(choose)
    return chosen.with_plan(plan)


def _kept(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return an earlier start's auto.json, if its question was the same and the file is valid."""
    try:
        found: dict[str, Any] = read_json(folder / AUTO)
        Plan.from_dict(found["plan"])
        return found if found["asked"] == asked and isinstance(found["said"], str) else None
    except (KeyError, TypeError, InvalidPlan, UnreadableFile):
        return None


def limit_to_budget(chosen: ChosenPlan, *, held: ExitStack) -> None:
    """Limit the memory of tensors on a GPU to `[auto] budget` until `held` closes. Collective, with the same config.

    torch's allocator keeps unused blocks while the device has room. Limited to the budget, it frees them before it
    asks for more, as the plan expects; a step that still needs more runs out of memory, as on a device of that size.
    There is no limit if units may be CUDA graphs: their pool cannot free blocks, so fragmentation could end a run.
    """
    budget, device = chosen.given.auto.budget_bytes, chosen.place.device
    if budget is None or device.type != "cuda" or chosen.may_capture:
        return
    outside = exchange(chosen.recorded("outside_bytes"))[0]
    if outside is None:
        # A fixed plan, which was not solved for the budget.
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(max(budget - outside, 0) / total, 1.0), device)
    held.callback(torch.cuda.set_per_process_memory_fraction, 1.0, device)
