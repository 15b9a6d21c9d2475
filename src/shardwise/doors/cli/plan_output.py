"""Shows the answer of `shardwise plan`: tables and sentences, or JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.base.vocabulary.quantities import GIB, digits, fixed_text, step_seconds_text
from shardwise.doors.cli.plan_answer import PlanAnswer
from shardwise.hardware.device import CURRENT
from shardwise.measure.report.text.budgets import frontier_data, frontier_table, training_data, training_table
from shardwise.measure.report.text.costs import as_data as candidate_data
from shardwise.measure.report.text.costs import as_table, scaling_data, scaling_table
from shardwise.measure.report.text.plain_table import legend
from shardwise.measure.report.text.queue_lanes import as_data as spans_as_data
from shardwise.measure.report.text.queue_lanes import as_lanes
from shardwise.measure.report.text.verdict import verdict
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.time.host_link import PINNED_BYTES_PER_S
from shardwise.planner.time.step_time import why_not_timed
from shardwise.program.spec.model import why_hardly_cut


def as_data(shown: PlanAnswer) -> dict[str, Any]:
    others = {"captured": shown.captured, "compiled": shown.compiled}
    data = {
        "model": shown.question.model.reference,
        "cluster": str(shown.found[0].cluster),
        "recommended": shown.recommendation.index,
        "why": shown.why,
        "fabric": {
            "assumed": shown.found[0].cluster.assumes_fabric,
            "needed_bytes_per_s": shown.needed_bytes_per_s,
        },
        "software": str(shown.found[0].cluster.device.software),
        "like": shown.question.like or None,
        "host": "probed" if shown.found[0].cluster.device.host is not None else "assumed",
        "candidates": [candidate_data(candidate) for candidate in shown.found],
        "ways": [
            {"change": way.change, "command": way.options.command, "candidate": candidate_data(way.candidate)}
            for way in shown.ways
        ],
        **{name: None if one is None else candidate_data(one) for name, one in others.items()},
    }
    if shown.training is not None:
        data["training"] = [training_data(row) for row in shown.training]
    if shown.frontier is not None:
        data["frontier"] = frontier_data(shown.frontier)
    if shown.scaling is not None:
        data["scaling"] = scaling_data(shown.scaling)
    if shown.spans is not None:
        data["timeline"] = spans_as_data(shown.spans)
    return data


def show(shown: PlanAnswer) -> None:
    from rich.console import Console

    console = Console()
    console.print(_heading(shown), highlight=False, markup=False)
    console.print(
        as_table(
            shown.found, recommended=shown.recommendation.index, chooses_recompute=bool(shown.question.row_recomputes)
        )
    )
    console.print(legend())
    if shown.training:
        console.print(training_table(shown.training))
    if shown.spans is not None:
        console.print(as_lanes(shown.spans), highlight=False, markup=False)
    if shown.frontier is not None:
        console.print(frontier_table(shown.frontier))
    if shown.scaling is not None:
        console.print(scaling_table(shown.scaling))
    for line in remarks(shown):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(shown: PlanAnswer) -> str:
    first, model = shown.found[0], shown.question.model
    capacity, plan = first.capacity_bytes, first.plan
    default = " (the default; --seq sets another)" if model.has_default_length else ""
    most = "up to " if model.lengths else ""
    seq = f", {most}{first.seq} tokens per sample{default}" if first.seq else ""
    room = f" ({fixed_text(capacity, unit=GIB)} each)" if capacity else ""
    loss = f", {model.loss} loss" if model.has_other_loss else ""
    units = f", units {plan.units}" if plan.units != AUTO_UNITS else ""
    recompute = "" if shown.question.row_recomputes else f", recompute {plan.recompute}"
    return (
        f"{model.reference} on {first.cluster}{room}: {plan.precision}{recompute}{seq}{units}, engine "
        f"{plan.engine}{loss}"
    )


def remarks(shown: PlanAnswer) -> Iterator[str]:
    """Yield the lines below the table."""
    first = shown.found[0]
    if shown.question.like:
        yield shown.question.like
    if not first.memory.activations_known:
        yield "States only: activations are unknown and not included."
    yield verdict(shown.recommendation, why=shown.why)
    for way in shown.ways:
        yield f"- {way.change}: {_cost_of(way.candidate)}: {way.options.command}"
    best_or_first = shown.recommendation.best or first
    yield from _about_memory(shown, best_or_first)
    yield from _about_time(shown, best_or_first)
    yield from _about_tables(shown)


def _cost_of(way: Candidate) -> str:
    rate = way.time.tokens_per_s_per_gpu if way.time is not None else None
    speed = f", {digits(rate)} tokens/s per GPU" if rate is not None else ""
    return f"{fixed_text(way.memory.device_bytes, unit=GIB)}{speed}"


def _about_memory(shown: PlanAnswer, best_or_first: Candidate) -> Iterator[str]:
    first = shown.found[0]
    reduced = [one.name for one in shown.found if one.plan.accumulate_reduced]
    if reduced and not shown.question.plan.accumulate_reduced:
        names = ", ".join(dict.fromkeys(reduced))
        yield f"Gradients kept unsharded between passes do not fit: {names} reduce them in every pass."
    hardly_cut = why_hardly_cut(shown.question.model.spec_for(first.plan), units=first.plan.units)
    if hardly_cut:
        yield f"Note: {hardly_cut}."
    totals = (best_or_first.memory.allocated_bytes, best_or_first.memory.reserved_bytes)
    tensors, reserved = (fixed_text(total, unit=GIB) for total in totals)
    yield f"{GIB.name} is the peak on the device; of {best_or_first.name} {tensors} are allocated, {reserved} reserved."
    if best_or_first.memory.host_bytes:
        yield (
            f"host is the memory of the host per rank; {best_or_first.name} needs "
            f"{fixed_text(best_or_first.node_host_bytes, unit=GIB)} per node, and pins it in about "
            f"{best_or_first.node_host_bytes / PINNED_BYTES_PER_S:.0f} s when it starts. --host-memory limits it."
        )
    if first.cluster.device.name == "cpu":
        yield (
            "The workspaces of the CPU's matrix products are not included: where they were measured, peaks of users' "
            "own models were 9 to 13% higher."
        )


def _times(one: Candidate) -> str:
    """Say how far a time may be off; of a kind that was never measured, between which speeds it may be."""
    band, time = one.time_band, one.time
    if time is None or band.is_of_a_measured_kind:
        return f"times {band}"
    rate, counted = time.tokens_per_s_per_gpu, "tokens/s per GPU"
    if rate is None:
        rate, counted = time.samples_per_s, "samples/s"
    slowest, fastest = digits(rate / (1 + band.upper)), digits(rate / (1 - band.lower))
    return f"not measured on this kind of device: between {slowest} and {fastest} {counted}"


def _about_time(shown: PlanAnswer, best_or_first: Candidate) -> Iterator[str]:
    first = shown.found[0]
    fits = f"fits means peak + {first.memory_band:.0%} ≤ capacity; " if first.capacity_bytes else ""
    unknown = why_not_timed(
        shown.question.model.spec_for(best_or_first.plan), plan=best_or_first.plan, cluster=best_or_first.cluster
    )
    of_best = f" of {best_or_first.name}" if first.time is not None else ""
    time = f"{_times(best_or_first)}; comm = exposed communication"
    yield f"Predicted, not measured; {fits}{f'time{of_best} is not predicted: {unknown}' if unknown else time}."
    if unknown is None and needs_whole_matrices(shown.question.optimizer):
        yield "The time of Muon's update is computed from its matrix products; it was not compared with measurements."
    if unknown is None and best_or_first.cluster.num_nodes > 1:
        yield _fabric_line(shown, best_or_first)
        yield from _about_crossing(shown.found)
    software = first.cluster.device.software
    if unknown is None and software != CURRENT and first.cluster.device.calibration is None:
        yield f"Kernels: {software}."
    yield from _other_steps(shown)
    if unknown is None and first.cluster.device.host is None:
        yield "The speed of the host CPU is assumed; --here measures it, on the machine itself."


def _about_crossing(found: Sequence[Candidate]) -> Iterator[str]:
    """Say what it costs that gathers that are to stay inside a node cross nodes."""
    for one in found:
        mesh, per_node = one.plan.mesh, one.cluster.devices_per_node
        if one.plan.is_sharded_across and mesh is not None and per_node % mesh.shard and one.time is not None:
            yield (
                f"The shard axis of {mesh} crosses nodes of {per_node} devices, and so do its gathers: communication "
                f"is exposed for {one.time.exposed_comm_seconds / one.time.step_seconds:.0%} of the step. "
                f"--mesh {one.cluster.num_nodes}x{per_node} keeps them inside."
            )
            return


def _other_steps(shown: PlanAnswer) -> Iterator[str]:
    """Say how long a step takes with units as CUDA graphs, and with compiled ones."""
    if shown.captured is not None and shown.captured.time is not None:
        yield (
            f"With units as CUDA graphs, which is the default, {shown.captured.name} takes "
            f"{step_seconds_text(shown.captured.time.step_seconds)} s per step and "
            f"{fixed_text(shown.captured.memory.reserved_bytes, unit=GIB)}."
        )
    if shown.compiled is not None and shown.compiled.time is not None:
        yield (
            f"With compiled units its step takes {step_seconds_text(shown.compiled.time.step_seconds)} s; "
            "--compile auto lets the solver choose that too (results then differ by rounding)."
        )


def _about_tables(shown: PlanAnswer) -> Iterator[str]:
    if shown.frontier is not None:
        yield "Frontier: excludes allocator overhead; a fixed plan has one strategy and one recompute for all units."
    if shown.training is not None:
        yield "Training: steps only; evaluations, checkpoints and failures are not included."
    if shown.scaling is not None:
        yield (
            "Scaling: a strategy keeps its micro-batch, so the global batch grows. Includes the wait for the slowest "
            "node; excludes allocator overhead and network congestion."
        )


def _fabric_line(shown: PlanAnswer, candidate: Candidate) -> str:
    """Say what the network is taken to be, what it must be, and what a slower one would mean."""
    fabric = candidate.cluster.fabric
    assert fabric is not None
    has = f"{fabric.bytes_per_s * 8e-9:,.0f} Gb/s per node"
    given = (
        f"Fabric assumed: {fabric} ({has}), that of the maker's own machine"
        if (candidate.cluster.assumes_fabric)
        else f"Fabric: {fabric} ({has})"
    )
    needed = shown.needed_bytes_per_s
    bound = f"below {needed * 8e-9:,.0f} Gb/s communication bounds the step" if needed else "any is fast enough"
    if candidate.slow_seconds is None or candidate.time is None:
        return f"{given}; {bound}."
    slow = f"with a quarter of it the step takes {step_seconds_text(candidate.slow_seconds)} s"
    return f"{given}; {bound}; {slow}. --fabric-gbps sets it."
