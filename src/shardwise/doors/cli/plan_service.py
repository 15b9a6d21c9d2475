"""What the planner page asks Python for: the answers of `shardwise plan`, with its own functions.

A change of a setting asks twice: for a quick answer, and for a refined one with the allocator's model. One answer is
computed at a time; one that is out of date ends before its next candidate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.collection import without_collection
from shardwise.doors.cli.plan_answer import PlanAnswer, PlanQuestion, answer
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_page_data import answer_data, chosen_row
from shardwise.doors.cli.plan_question import cluster_for, model_for, question_of
from shardwise.doors.cli.plan_settings import as_settings, asked_options
from shardwise.doors.interchange.exported import JobShape
from shardwise.doors.interchange.targets import TARGETS
from shardwise.doors.interchange.targets import export as exported_for
from shardwise.hardware import Cluster, Device
from shardwise.hardware.cluster import parse_cluster
from shardwise.hardware.device import devices
from shardwise.hardware.prices import prices
from shardwise.measure.report.planner_page.planner_document import planner_page, saved_page
from shardwise.measure.report.planner_page.planner_server import Answers, Asked, Document, Superseded
from shardwise.measure.report.text.budgets import frontier_data
from shardwise.models.catalogue import CATALOGUE
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.candidates import SpecFor
from shardwise.planner.search.frontier import fixed_frontier
from shardwise.planner.search.request import RECOMPUTES
from shardwise.planner.time.collective import can_link
from shardwise.planner.time.compute import can_time
from shardwise.program.spec import ModelSpec

PER_NODE = 8
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_RANKS = 2**16
_MOST_KEPT = 256


def offered_devices() -> list[Device]:
    """Return the package's devices whose capacity, speeds and links are known, so that every time is predicted."""
    gpus = [device for device in devices().values() if device.name != "cpu" and device.capacity_bytes is not None]
    linked = [device for device in gpus if device.host_link and can_link(parse_cluster(f"{PER_NODE}x{device.name}"))]
    return [device for device in linked if can_time(device)]


class PlanService:
    """Answers the page's questions; `options` are those of the command, which the page's settings replace."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._lock = Lock()
        self._newest: dict[str, object] = {}
        self._known: dict[tuple[PlanOptions, bool], PlanAnswer] = {}
        self._models: dict[tuple[str, int | None], Model] = {}
        self._clusters: dict[tuple[str, str | None], Cluster] = {}
        self._devices = {device.name: device for device in offered_devices()}
        self._check_cluster(options)
        question = self._question(options)
        if not question.spec_for(question.plan).traces:
            raise InvalidPlan(f"{options.model}: only its number of parameters is known, so that no page can plan it")
        self._page = planner_page(self._offers())

    @property
    def answers(self) -> Answers:
        return {
            "": lambda _: Document(text=self._page),
            "answer": self.answer,
            "frontier": self.frontier,
            "export": self.export,
            "saved": self.saved,
        }

    def answer(self, asked: Asked) -> dict[str, Any]:
        """Return the answer to a setting; `refined` is 0 or 1, and `chosen` names the plan whose step is drawn.

        `page`: the one that asks; its earlier questions are then out of date.
        """
        refined, chosen, page = asked.pop("refined", "1"), asked.pop("chosen", ""), asked.pop("page", "")
        if refined not in ("0", "1"):
            raise InvalidPlan(f"refined = {refined[:20]!r}: must be 0 or 1")
        options = self._asked(asked)
        with self._turn(page) as check:
            found = self._answer(options, is_quick=refined == "0", check=check)
            return answer_data(found, options=options, chosen=chosen)

    def frontier(self, asked: Asked) -> dict[str, Any]:
        """Return the best throughput of one strategy for each memory budget, without the allocator's model."""
        page = asked.pop("page", "")
        options = self._asked(asked)
        with self._turn(page) as check:
            question = self._question(options)
            return {"frontier": frontier_data(fixed_frontier(_watched(question, check), request=question))}

    def export(self, asked: Asked) -> dict[str, Any]:
        """Return the files of the chosen plan for another tool, `to`, and the settings that were left out."""
        target, chosen = asked.pop("to", ""), asked.pop("chosen", "")
        options = self._asked(asked)
        with self._turn() as check:
            found = self._answer(options, is_quick=False, check=check)
        best = found.found[chosen_row(found, name=chosen)]
        shape = JobShape(num_nodes=best.cluster.num_nodes, ranks_per_node=best.cluster.devices_per_node)
        exported = exported_for(best.plan, shape, target=target)
        return {"files": dict(exported.files), "left_out": list(exported.left_out)}

    def saved(self, asked: Asked) -> Document:
        """Return the refined answer to a setting as a file."""
        settings = {name: value for name, value in asked.items() if name != "chosen"}
        data = {**self.answer(asked), **self.frontier(settings)}
        return Document(text=saved_page(data), file_name="shardwise-plan.html")

    # ---- questions

    def _asked(self, asked: Asked) -> PlanOptions:
        """Return the options that a query asks for."""
        options = asked_options(asked, base=self._options)
        self._check_cluster(options)
        # A config is read, while python: would run a file.
        if options.model not in (self._options.model, *CATALOGUE) and not options.model.startswith("hf:"):
            raise InvalidPlan(f"{options.model[:100]}: is not a model of this page, nor hf:DIR")
        return options

    def _check_cluster(self, options: PlanOptions) -> None:
        cluster = parse_cluster(options.cluster)
        if cluster.device.name not in self._devices:
            names = ", ".join(self._devices)
            raise InvalidPlan(f"--cluster {cluster}: the page has no {cluster.device.name}; it has {names}")
        if cluster.num_ranks > _MOST_RANKS:
            raise InvalidPlan(f"--cluster {cluster}: the page has at most {_MOST_RANKS:,} devices")

    def _cluster(self, options: PlanOptions) -> Cluster:
        # Caches of the planner know a cluster by its identity.
        key = options.cluster, options.host_memory
        if key not in self._clusters:
            self._clusters[key] = cluster_for(options)
        return self._clusters[key]

    def _model(self, options: PlanOptions) -> Model:
        """Return the model for samples of this length, which must not need another trace."""
        is_own = options.model == self._options.model
        first = replace(options, seq=self._options.seq if is_own else None)
        model = self._kept_model(first)
        if options.seq == first.seq:
            return model
        if not 1 <= (options.seq or 1) <= (model.longest_sample or 0):
            raise InvalidPlan(f"--seq {options.seq}: {options.model} has no laws for samples of this length")
        return self._kept_model(options)

    def _kept_model(self, options: PlanOptions) -> Model:
        if options.lora is not None and options.lora != self._options.lora:
            raise InvalidPlan(f"--lora {options.lora}: the page was opened without it")
        key = options.model, options.seq
        if key not in self._models:
            is_own = options.model == self._options.model
            self._models[key] = model_for(options if is_own else replace(options, image=None))
        return self._models[key]

    def _question(self, options: PlanOptions) -> PlanQuestion:
        """Return the question, of a spec with all ways to recompute: the planner's caches are those of one spec."""
        question = question_of(options, cluster_of=self._cluster, named=self._model)

        def spec_for(*plans: Plan) -> ModelSpec:
            others = (replace(plan, recompute=recompute) for plan in plans for recompute in RECOMPUTES)
            return question.model.spec_for(*plans, *others)

        return replace(question, spec_for=spec_for)

    @contextmanager
    def _turn(self, page: str = "") -> Iterator[Callable[[], None]]:
        """Wait until nothing else is computed; the value raises Superseded once the same page has asked again."""
        turn = object()
        if page:
            if len(self._newest) >= _MOST_KEPT:
                self._newest.clear()
            self._newest[page] = turn

        def check() -> None:
            if page and self._newest.get(page) is not turn:
                raise Superseded("the page has asked again")

        # Collecting among all jobs that the planner keeps takes a third of the time.
        with self._lock, without_collection():
            check()
            yield check

    def _answer(self, options: PlanOptions, *, is_quick: bool, check: Callable[[], None]) -> PlanAnswer:
        key = options, is_quick
        if key not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            question = replace(self._question(options), quick=is_quick)
            found = answer(replace(question, spec_for=_watched(question, check)))
            self._known[key] = replace(found, question=question)
        return self._known[key]

    def _offers(self) -> dict[str, Any]:
        own = self._options.model
        listed = prices()
        return {
            "models": [own, *(name for name in CATALOGUE if name != own)],
            "devices": {
                name: {
                    "title": device.title or name,
                    "capacity_bytes": device.capacity_bytes.value if device.capacity_bytes else None,
                    "has_fabric": device.nic is not None,
                    "price": [price.per_gpu_hour, price.source, price.date] if (price := listed.get(name)) else None,
                }
                for name, device in self._devices.items()
            },
            "counts": list(_COUNTS),
            "per_node": PER_NODE,
            "targets": list(TARGETS),
            "start": as_settings(self._options),
        }


def _watched(question: PlanQuestion, check: Callable[[], None]) -> SpecFor:
    """Return its `spec_for`, which ends a computation before the next candidate, once that is out of date."""

    def spec_for(*plans: Plan) -> ModelSpec:
        check()
        return question.spec_for(*plans)

    return spec_for
