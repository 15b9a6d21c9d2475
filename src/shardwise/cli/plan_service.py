"""What the planner page asks Python for: the answers of `shardwise plan`, with its own functions.

A change of a setting asks twice: for a quick answer, and for a refined one with the allocator's model. One answer is
computed at a time; one that is out of date ends before its next candidate.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import tomli_w

from shardwise.cli.plan_answer import PlanAnswer, answer
from shardwise.cli.plan_output import as_data, remarks
from shardwise.cli.plan_question import PlanOptions, cluster_for, question_of, source_for
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.hardware import Cluster, Device
from shardwise.hardware.cluster import parse_cluster
from shardwise.hardware.device import devices
from shardwise.hardware.prices import prices
from shardwise.interchange.exported import JobShape
from shardwise.interchange.targets import TARGETS
from shardwise.interchange.targets import export as exported_for
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.frontier import fixed_frontier
from shardwise.planner.search.recommend import best_of
from shardwise.planner.search.request import RECOMPUTES
from shardwise.planner.time.collective import can_link
from shardwise.planner.time.compute import can_time
from shardwise.planner.time.step_time import timeline
from shardwise.report.planner_page.planner_document import planner_page, saved_page
from shardwise.report.planner_page.planner_server import Answers, Asked, Document, Superseded
from shardwise.report.text.budgets import frontier_data
from shardwise.report.text.queue_lanes import as_data as spans_as_data
from shardwise.report.text.verdict import changed_options, in_host_memory, name_of
from shardwise.sources import Source
from shardwise.spec import ModelSpec
from shardwise.vocabulary.collection import without_collection

PER_NODE = 8
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_RANKS = 2**16
_MOST_KEPT = 256


def _text(value: str) -> str:
    if not re.fullmatch(r"[\w.,:=*+@ -]{1,100}", value, re.ASCII):
        raise ValueError
    return value


def _whole(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value, re.ASCII):
        raise ValueError
    return int(value)


def _money(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,4})?", value, re.ASCII):
        raise ValueError
    return float(value)


# What the page may set: no option that names a file or traces another model. An empty value is the default.
_TEXTS = ("model", "cluster", "strategy", "precision", "recompute", "update", "mesh", "reduce_dtype", "budget")
_MORE_TEXTS = ("host_memory", "offload", "optimizer", "goal", "tokens", "capture", "overlap")
_SETTINGS: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys((*_TEXTS, *_MORE_TEXTS), _text),
    **dict.fromkeys(("micro_batch", "seq", "global_batch", "accumulate"), _whole),
    "price": _money,
    "accumulate_reduced": lambda value: value == "1",
}


def offered_devices() -> list[Device]:
    """Return the package's devices whose capacity, speeds and links are known."""
    gpus = [device for device in devices().values() if device.name != "cpu" and device.capacity_bytes is not None]
    return [one for one in gpus if can_time(one) and can_link(parse_cluster(f"{PER_NODE}x{one.name}"))]


class PlanService:
    """Answers the page's questions; `options` are those of the command, which the page's settings replace."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._lock = Lock()
        self._newest: dict[str, object] = {}
        self._known: dict[tuple[PlanOptions, bool], PlanAnswer] = {}
        self._sources: dict[tuple[str, int | None], Source] = {}
        self._clusters: dict[tuple[str, str | None], Cluster] = {}
        self._devices = {device.name: device for device in offered_devices()}
        self._check_cluster(options)
        question = question_of(options, cluster_of=self._cluster, model_of=self._source)
        if not question.source.spec_for(question.plan).traces:
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
            return self._as_data(found, options=options, chosen=chosen)

    def frontier(self, asked: Asked) -> dict[str, Any]:
        """Return the best throughput of one strategy for each memory budget, without the allocator's model."""
        page = asked.pop("page", "")
        options = self._asked(asked)
        with self._turn(page) as check:
            question = question_of(options, cluster_of=self._cluster, model_of=self._source)
            watched = _Watched(self._source(options), check)
            return {"frontier": frontier_data(fixed_frontier(watched.spec_for, request=question))}

    def export(self, asked: Asked) -> dict[str, Any]:
        """Return the files of the chosen plan for another tool, `to`, and the settings that were left out."""
        target, chosen = asked.pop("to", ""), asked.pop("chosen", "")
        options = self._asked(asked)
        with self._turn() as check:
            found = self._answer(options, is_quick=False, check=check)
        best = found.found[_chosen(found, name=chosen)]
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
        given: dict[str, Any] = {}
        for name, value in asked.items():
            if name not in _SETTINGS:
                raise UnknownName.of("setting", name[:40], known=_SETTINGS)
            try:
                given[name] = _SETTINGS[name](value) if value else _DEFAULTS[name]
            except (KeyError, ValueError) as error:
                raise InvalidPlan(f"{name} = {value[:100]!r}: this is no {name} that the page can ask for") from error
        options = replace(self._options, **given)
        self._check_cluster(options)
        if options.model not in (self._options.model, *CATALOGUE):
            raise InvalidPlan(f"{options.model[:100]}: is not a model of this page")
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

    def _source(self, options: PlanOptions) -> Source:
        """Return the model for samples of this length, which must not need another trace."""
        is_own = options.model == self._options.model
        first = replace(options, seq=self._options.seq if is_own else None)
        source = self._traced(first)
        if options.seq == first.seq:
            return source
        if not 1 <= (options.seq or 1) <= (source.longest_sample or 0):
            raise InvalidPlan(f"--seq {options.seq}: {options.model} has no laws for samples of this length")
        return self._traced(options)

    def _traced(self, options: PlanOptions) -> Source:
        """Return the model with the traces of all ways to recompute: each further one would empty all caches."""
        key = options.model, options.seq
        if key not in self._sources:
            is_own = options.model == self._options.model
            source = source_for(options if is_own else replace(options, image=None))
            for recompute in RECOMPUTES:
                source.spec_for(Plan(precision=options.precision, recompute=recompute, units=options.units))
            self._sources[key] = source
        return self._sources[key]

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
            question = replace(question_of(options, cluster_of=self._cluster, model_of=self._source), quick=is_quick)
            found = answer(replace(question, source=_Watched(self._source(options), check)))
            self._known[key] = replace(found, question=question)
        return self._known[key]

    # ---- answers

    def _as_data(self, found: PlanAnswer, *, options: PlanOptions, chosen: str) -> dict[str, Any]:
        """Return the answer for the page: `plan` is what `plan --json` prints, the rest is only for what it shows.

        rows     the candidates that are drawn: of each strategy the one on its best mesh
        files    plan.toml of each candidate
        ways     where nothing fits: settings that do, and the text of their button
        """
        source, first = self._source(options), found.found[0]
        spec, index = source.spec_for(first.plan), _chosen(found, name=chosen)
        one = found.found[index]
        spans = timeline(source.spec_for(one.plan), plan=one.plan, cluster=one.cluster, optimizer=options.optimizer)
        return {
            "plan": as_data(found),
            "is_quick": found.question.quick,
            "num_params": spec.num_params,
            "seq": spec.seq,
            "longest": source.longest_sample,
            "title": first.cluster.device.title or first.cluster.device.name,
            "cluster": _shape(first.cluster),
            "optimizer": options.optimizer,
            "rows": _rows(found),
            "labels": [name_of(candidate) for candidate in found.found],
            "files": [tomli_w.dumps(candidate.plan.to_dict()) for candidate in found.found],
            "ways": [_way(way, found=found) for way in found.ways],
            "remarks": [] if found.question.quick else list(remarks(found)),
            "command": options.command,
            "chosen": index,
            "timeline": spans_as_data(spans),
        }

    def _offers(self) -> dict[str, Any]:
        own = self._options.model
        listed = prices()
        start = {name: getattr(self._options, name) for name in _SETTINGS}
        return {
            "models": [own, *(name for name in CATALOGUE if name != own)],
            "devices": {
                name: {
                    "title": device.title or name,
                    "capacity_bytes": device.capacity_bytes.value if device.capacity_bytes else None,
                    "has_fabric": device.nic is not None,
                    "has_host": device.host_link is not None,
                    "price": [price.per_gpu_hour, price.source, price.date] if (price := listed.get(name)) else None,
                }
                for name, device in self._devices.items()
            },
            "counts": list(_COUNTS),
            "per_node": PER_NODE,
            "targets": list(TARGETS),
            "start": {
                name: "1" if value is True else str(value)
                for name, value in start.items()
                if value is not None and value is not False and value != _DEFAULTS.get(name)
            },
        }


_DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in PlanOptions.__dataclass_fields__.items() if name not in ("model", "cluster")
}


@dataclass(frozen=True, slots=True)
class _Watched:
    """A model whose computations end before the next candidate, once they are out of date."""

    source: Source
    check: Callable[[], None]

    def spec_for(self, plan: Plan) -> ModelSpec:
        self.check()
        return self.source.spec_for(plan)

    @property
    def reference(self) -> str:
        return self.source.reference

    @property
    def loss(self) -> str:
        return self.source.loss

    @property
    def has_other_loss(self) -> bool:
        return self.source.has_other_loss

    @property
    def has_default_length(self) -> bool:
        return self.source.has_default_length


def _rows(found: PlanAnswer) -> list[int]:
    """Return one candidate per strategy: the recommended one, the best that fits, or the smallest."""

    def best(own: Sequence[Candidate]) -> Candidate:
        if found.recommendation.best is not None and found.recommendation.best in own:
            return found.recommendation.best
        fitting = (best_of([one for one in own if one.fits == fits]) for fits in ("yes", "tight"))
        return next(filter(None, fitting), None) or min(own, key=lambda one: one.memory.device_bytes)

    names = dict.fromkeys(one.name for one in found.found)
    return [found.found.index(best([one for one in found.found if one.name == name])) for name in names]


def _chosen(found: PlanAnswer, *, name: str) -> int:
    """Return the row of a strategy; without such a one, the recommended row or the last."""
    rows = _rows(found)
    own = next((row for row in rows if found.found[row].name == name), None)
    best = found.recommendation.index
    return own if own is not None else best if best is not None else rows[-1]


def _shape(cluster: Cluster) -> dict[str, Any]:
    return {
        "device": cluster.device.name,
        "num_ranks": cluster.num_ranks,
        "num_nodes": cluster.num_nodes,
        "per_node": cluster.devices_per_node,
    }


def _way(way: Candidate, *, found: PlanAnswer) -> dict[str, Any]:
    """Return the setting of a way out, and the text of its button."""
    options = changed_options(way, asked=found.question.plan, found=found.found)
    setting = {name.removeprefix("--").replace("-", "_"): value or "1" for name, value in options.items()}
    texts = [f"{name.removeprefix('--')} {value}".strip() for name, value in options.items()]
    if way.cluster.num_ranks != found.found[0].cluster.num_ranks:
        setting["cluster"] = str(way.cluster)
        texts.insert(0, f"{way.cluster.num_ranks} GPUs")
    *before, last = texts
    text = f"{', '.join(before)} and {last}" if before else last
    return {"text": f"{text}{in_host_memory(way)}", "setting": setting}
