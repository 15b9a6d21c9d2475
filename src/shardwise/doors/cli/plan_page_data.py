"""An answer of `shardwise plan` as the planner page needs it: the JSON of the command, and what is drawn of it."""

from collections.abc import Sequence
from typing import Any

import tomli_w

from shardwise.doors.cli.plan_answer import PlanAnswer, WayOut
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_output import as_data, remarks
from shardwise.doors.cli.plan_settings import as_settings
from shardwise.hardware import Cluster
from shardwise.measure.report.text.queue_lanes import as_data as spans_as_data
from shardwise.measure.report.text.verdict import name_of
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.recommend import best_of
from shardwise.planner.time.step_time import timeline


def answer_data(found: PlanAnswer, *, options: PlanOptions, chosen: str) -> dict[str, Any]:
    """Return the answer; `plan` is what `plan --json` prints.

    rows      the candidates that are drawn: of each strategy the one on its best mesh
    files     plan.toml of each candidate
    ways      where nothing fits: settings that do, and the text of their button
    timeline  one step of the strategy `chosen`, or of the recommended one
    """
    first, index = found.found[0], chosen_row(found, name=chosen)
    spec, one = found.question.spec_for(first.plan), found.found[index]
    spans = timeline(found.question.spec_for(one.plan), plan=one.plan, cluster=one.cluster, optimizer=options.optimizer)
    return {
        "plan": as_data(found),
        "is_quick": found.question.quick,
        "num_params": spec.num_params,
        "seq": spec.seq,
        "longest": found.question.model.longest_sample,
        "title": first.cluster.device.title or first.cluster.device.name,
        "cluster": _shape(first.cluster),
        "optimizer": options.optimizer,
        "rows": _rows(found),
        "labels": [name_of(candidate) for candidate in found.found],
        "files": [tomli_w.dumps(found.saved(candidate).to_dict()) for candidate in found.found],
        "ways": [_way(way, options=options) for way in found.ways],
        "remarks": [] if found.question.quick else list(remarks(found)),
        "command": options.command,
        "chosen": index,
        "timeline": spans_as_data(spans),
    }


def _rows(found: PlanAnswer) -> list[int]:
    """Return one candidate per strategy: the recommended one, the best that fits, or the smallest."""

    def best(own: Sequence[Candidate]) -> Candidate:
        if found.recommendation.best is not None and found.recommendation.best in own:
            return found.recommendation.best
        fitting = (best_of([one for one in own if one.fits == fits]) for fits in ("yes", "tight"))
        return next(filter(None, fitting), None) or min(own, key=lambda one: one.memory.device_bytes)

    names = dict.fromkeys(one.name for one in found.found)
    return [found.found.index(best([one for one in found.found if one.name == name])) for name in names]


def chosen_row(found: PlanAnswer, *, name: str) -> int:
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


def _way(way: WayOut, *, options: PlanOptions) -> dict[str, Any]:
    """Return the settings of a way out that differ, and the text of its button."""
    before, after = as_settings(options), as_settings(way.options)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {"text": way.change, "setting": {name: after.get(name, "") for name in changed}}
