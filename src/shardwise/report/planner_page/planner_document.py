"""The planner page as one HTML file: without a server, and without asking the network for anything."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any

import tomli_w

from shardwise.models.catalogue import CATALOGUE
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.plan.mesh import Mesh
from shardwise.report.page.content_policy import content_policy
from shardwise.report.page.markup import Markup, data_script, element
from shardwise.report.planner_page.device_tables import hardware_data, offered_devices
from shardwise.report.planner_page.model_laws import PAGE_PLAN, model_data
from shardwise.sources import Source

MODEL_SCRIPTS = ("memory.js", "ledger.js", "allocator.js", "kernels.js", "queues.js", "search.js")
"""What computes; the others need a document to show it in."""

SCRIPTS = (*MODEL_SCRIPTS, "charts.js", "view.js", "page.js")

STATIC_MODELS = (
    *("gpt2-124m", "gpt2-1.5b", "gpt-1.3b", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
    *("llama-2-7b", "llama-2-13b", "mpt-7b", "mpt-30b", "vit-large", "vit-huge", "resnet50"),
)
"""Those that the file holds; a server offers all of the catalogue."""

_FEW = 4

_LONGEST = 131_072
"""Tokens that rotary positions are offered for."""


def catalogue_model(name: str) -> dict[str, Any]:
    """The data of a model of the catalogue."""
    with _collector_paused():
        return model_data(Source(name).spec_for, name=name, longest=longest_sample(name))


def catalogue_models(names: Sequence[str]) -> list[dict[str, Any]]:
    """The data of several, made in one process per core unless they are few: a process takes a second to start."""
    num_workers = os.cpu_count() or 1
    if num_workers == 1 or len(names) < _FEW:
        return [catalogue_model(name) for name in names]
    with ProcessPoolExecutor(min(num_workers, len(names)), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(catalogue_model, names))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The planner keeps all jobs of a model. The garbage collector would look through them again and again, which takes
    a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def longest_sample(name: str) -> int | None:
    """Tokens of the longest sample that is offered; None where samples have no length."""
    shape = CATALOGUE[name]
    if isinstance(shape, LlamaShape):
        return _LONGEST
    return shape.max_seq if isinstance(shape, GPTShape) else None


def planner_page(models: Sequence[dict[str, Any]], *, start: dict[str, Any], server: dict[str, Any] | None) -> str:
    """The document with the data of `models`.

    start    settings that it opens with, where its address does not say others
    server   what a server offers besides: names of models, targets of export; None for a file
    """
    folder = files("shardwise.report.planner_page")
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in (*SCRIPTS, "page.html")}
    report_style = files("shardwise.report.page").joinpath("page.css").read_text(encoding="utf-8")
    style = report_style + folder.joinpath("planner.css").read_text(encoding="utf-8")
    scripts = [texts[name] for name in SCRIPTS]
    policy = content_policy(style, scripts, connects=server is not None)
    data = {
        "hardware": hardware_data(offered_devices()),
        "plan": tomli_w.dumps(replace(PAGE_PLAN, mesh=Mesh(), micro_batch=1).to_dict()),
        "start": start,
        "server": server,
    }
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "Shardwise planner"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        Markup(texts["page.html"]),
        data_script(data, id_="planner-data"),
        *(data_script(model, id_=f"model-{number}") for number, model in enumerate(models)),
        *(element("script", Markup(script)) for script in scripts),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"
