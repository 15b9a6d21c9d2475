"""Predictions from Python, as `shardwise plan` makes them: `shardwise.predict(model, cluster="8xh100-80gb")`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.base.vocabulary.html_table import html_table
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.hardware import cluster_of
from shardwise.measure.report.text.verdict import reasons
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.search.candidates import Candidate, candidates
from shardwise.planner.search.recommend import recommend
from shardwise.planner.search.request import RECOMPUTES

if TYPE_CHECKING:
    from shardwise.models.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The cost of every strategy on a cluster. A notebook shows it as a table.

    candidates    one per strategy, each at its largest micro-batch: plan, memory, time, fits
    recommended   the plan to use, for shardwise.prepare; None if nothing fits
    why           the reason, as a sentence
    """

    model: str
    cluster: str
    candidates: tuple[Candidate, ...]
    recommended: Plan | None
    why: str

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}: {self.why}"

    def _repr_html_(self) -> str:
        heads = ("", "strategy", "micro-batch", "peak on the device", "fits", "s per step", "samples/s")
        rows = [
            (
                "▶" if one.plan == self.recommended else "",
                one.name,
                str(one.batch),
                bytes_text(one.memory.device_bytes),
                one.fits,
                "–" if one.time is None else f"{one.time.step_seconds:.4g}",
                "–" if one.time is None else f"{one.time.samples_per_s:,.4g}",
            )
            for one in self.candidates
        ]
        return html_table(heads, rows, title=f"{self.model} on {self.cluster}, predicted", text=self.why)


def predict(
    model: "Task | str",
    *,
    cluster: str,
    plan: Plan | None = None,
    seq: int | None = None,
    optimizer: str = "adamw",
    goal: str = "throughput",
) -> Predictions:
    """Predict memory and speed of every strategy on a cluster, and recommend one. Needs no GPU.

        shardwise.predict("llama-3.1-8b", cluster="8xh100-80gb", plan=Plan(precision="bf16", recompute="full"))

    `model` and `cluster` are those of `shardwise plan`, or the model is a Task. `plan` gives all settings but the
    strategy (default: bf16, and the recompute that is the fastest that fits); where it has no micro_batch, the largest
    that fits is taken.
    """
    named, where = Model(model, seq=seq), cluster_of(cluster)
    found = candidates(
        named.spec_for,
        plan=plan or Plan(precision="bf16"),
        strategies=tuple(STRATEGIES),
        cluster=where,
        optimizer=optimizer,
        goal=goal,
        recomputes=RECOMPUTES if plan is None else (),
    )
    chosen = recommend(found, goal=goal, spec_for=named.spec_for, optimizer=optimizer)
    return Predictions(
        model=named.reference,
        cluster=str(where),
        candidates=tuple(found),
        recommended=None if chosen.best is None else chosen.best.plan,
        why=reasons(chosen) if chosen.best is None else f"Recommended: {chosen.best.name}, {reasons(chosen)}.",
    )
