"""The planner page as one HTML file, which needs no server and no network."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import tomli_w

from shardwise.models.catalogue import CATALOGUE
from shardwise.models.shapes import GPTShape, TokenShape
from shardwise.plan.mesh import Mesh
from shardwise.report.page.html_document import asset, html_document
from shardwise.report.page.markup import Markup, data_script
from shardwise.report.planner_page.device_tables import hardware_data, offered_devices
from shardwise.report.planner_page.model_laws import model_data
from shardwise.report.planner_page.page_plans import PAGE_PLAN
from shardwise.sources import Source
from shardwise.spec.shipped import ready_spec
from shardwise.vocabulary.collection import without_collection

MODEL_SCRIPTS = ("memory.js", "ledger.js", "allocator.js", "kernels.js", "queues.js", "search.js")
"""The scripts that compute; they need no document."""

SCRIPTS = (*MODEL_SCRIPTS, "charts.js", "view.js", "page.js")

STATIC_MODELS = (
    *("gpt2-124m", "gpt2-1.5b", "gpt-1.3b", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
    *("llama-2-7b", "llama-2-13b", "mpt-7b", "mpt-30b", "vit-large", "vit-huge", "resnet50"),
)
"""The models in the file; a server offers the whole catalogue."""

_FEW = 4

_LONGEST = 131_072
"""The longest sample that is offered for models with rotary positions, in tokens."""


def catalogue_model(name: str) -> dict[str, Any]:
    # Collecting among all jobs that the planner keeps takes a third of the time.
    with without_collection():
        return model_data(Source(name).spec_for, name=name, longest=longest_sample(name))


def catalogue_models(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the data of several models, made in one process per core; few are made here, as processes start slowly."""
    num_workers = os.cpu_count() or 1
    if num_workers == 1 or len(names) < _FEW:
        return [catalogue_model(name) for name in names]
    with ProcessPoolExecutor(min(num_workers, len(names)), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(catalogue_model, names))


def longest_sample(name: str) -> int | None:
    """Return the tokens of the longest sample that is offered; None if samples have no length."""
    shape = CATALOGUE[name]
    if isinstance(shape, GPTShape):
        return shape.max_seq
    # A model without a shipped spec is traced at one length.
    return _LONGEST if isinstance(shape, TokenShape) and ready_spec(name, ways=()) is not None else None


def planner_page(models: Sequence[dict[str, Any]], *, start: dict[str, Any], server: dict[str, Any] | None) -> str:
    """Return the page with the data of `models`.

    start    the settings that it opens with, unless its address has others
    server   what a server offers in addition: names of models, targets of export; None for a file
    """
    package = "shardwise.report.planner_page"
    data = {
        "hardware": hardware_data(offered_devices()),
        "plan": tomli_w.dumps(replace(PAGE_PLAN, mesh=Mesh(), micro_batch=1).to_dict()),
        "start": start,
        "server": server,
    }
    return html_document(
        "Shardwise planner",
        Markup(asset("page.html", package=package)),
        data_script(data, id_="planner-data"),
        *(data_script(model, id_=f"model-{number}") for number, model in enumerate(models)),
        style=asset("page.css") + asset("planner.css", package=package),
        scripts=[asset(name, package=package) for name in SCRIPTS],
        connects_to_server=server is not None,
    )
