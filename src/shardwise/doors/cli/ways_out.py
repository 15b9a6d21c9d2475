"""Ways out where nothing fits: other options of `shardwise plan`, those first that cost the user the least."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from shardwise.base.errors import ShardwiseError
from shardwise.base.vocabulary.quantities import GIB, fixed_text
from shardwise.doors.cli.plan_answer import PlanQuestion, WayOut, fixed_candidates
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.hardware import Cluster
from shardwise.hardware.prices import prices
from shardwise.plan.limits import LIMITS
from shardwise.plan.placement import AUTO
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.larger_clusters import larger_clusters
from shardwise.planner.search.recommend import best_of
from shardwise.planner.search.rent import best_in_host_memory

MOST = 4
"""The most ways out that are shown."""
LORA_RANK = 16


def ways_out(question: PlanQuestion) -> list[WayOut]:
    """Return at most MOST changes of the question that fit, of each kind the smallest."""
    found: list[WayOut] = []
    for change, tried in _kinds(question):
        way = _first(question, change, tried)
        if way is not None and way.candidate not in [one.candidate for one in found]:
            found.append(way)
        if len(found) == MOST:
            break
    return found


def _first(question: PlanQuestion, change: str, tried: Iterable[PlanOptions]) -> WayOut | None:
    for options in tried:
        # An engine, a model or a cluster may not have what is tried.
        with suppress(ShardwiseError):
            found = _fitting(question.ask(options))
            if found is not None:
                return WayOut(change=change.format_map(_numbers(found)), options=options, candidate=found)
    return None


def _fitting(question: PlanQuestion) -> Candidate | None:
    if question.strategy == AUTO:
        return best_in_host_memory(question.spec_for, request=question)
    best = None
    for quick in (True, False):
        found = [one for one in fixed_candidates(question, quick=quick) if one.fits == "yes"]
        best = best_of([one for one in found if one.node_host_bytes <= _host_bytes(one.cluster)])
        if best is None:
            break
    return best


def _numbers(found: Candidate) -> dict[str, object]:
    host = "choices for each unit"
    if found.node_host_bytes:
        host = f"host memory, {fixed_text(found.node_host_bytes, unit=GIB)} per node"
    return {"strategy": found.plan.strategy, "ranks": found.cluster.num_ranks, "host": host} | {
        name: getattr(found.plan, name) for name in ("micro_batch", "accumulate", "precision")
    }


def _kinds(question: PlanQuestion) -> Iterator[tuple[str, Iterable[PlanOptions]]]:
    """Yield each kind of change, the cheapest for the user first, with the options that are tried for it."""
    asked = question.options
    # In another system only full recomputation is certain to be the least.
    recompute = "full" if asked.like else None
    free = replace(asked, strategy=None, mesh=None, across=None, recompute=recompute, micro_batch=None)
    sized = replace(free, micro_batch=asked.micro_batch)
    yield "another strategy, {strategy}", [replace(asked, strategy=None)] if asked.strategy else []
    yield "without --mesh", [replace(asked, mesh=None, across=None)] if asked.mesh else []
    if asked.recompute != recompute:
        yield "recompute activations", [replace(asked, recompute=recompute)]
        yield "{strategy}, and recompute activations", [sized]
    yield "{micro_batch} samples per pass, in {accumulate} passes", _smaller(asked, sized)
    yield "{ranks} devices", (replace(free, cluster=str(where)) for where in larger_clusters(question.cluster))
    yield "{host}", _in_host_memory(free, cluster=question.cluster)
    if asked.lora is None:
        yield "LoRA: adapters are trained, the model is frozen", [replace(free, lora=LORA_RANK)]
    if asked.quantize is None:
        quantized = replace(free, lora=asked.lora or LORA_RANK, quantize="nf4")
        yield "QLoRA: adapters on a model in 4 bits", [quantized]
    # Only ours runs units as CUDA graphs.
    if asked.like or not LIMITS[question.plan.engine].has("capture"):
        yield "Shardwise's engine", [replace(free, like="", engine=None, recompute=None)]
    if asked.precision == "fp32":
        yield "computation in {precision}", [replace(free, precision="bf16")]
    if question.plan.reduce_dtype == "fp32" and asked.precision in ("bf16", "fp16"):
        yield "gradients summed in {precision}, which rounds them", [replace(free, reduce_dtype=asked.precision)]


def _smaller(*tried: PlanOptions) -> Iterator[PlanOptions]:
    """Yield a smaller micro-batch and more passes, so that a step has as many samples."""
    for options in tried:
        given = options.micro_batch or 1
        for batch in range(given - 1, 0, -1):
            if given % batch == 0:
                yield replace(options, micro_batch=batch, accumulate=options.accumulate * given // batch)


def _in_host_memory(options: PlanOptions, *, cluster: Cluster) -> Iterator[PlanOptions]:
    """Yield plans that use no more host memory than the machine has."""
    num_bytes = _host_bytes(cluster)
    limited = replace(options, host_memory=f"{num_bytes >> 30}{GIB.name}")
    if num_bytes and not options.offload:
        yield replace(limited, offload="states")
        yield replace(limited, offload="states,activations")
        yield replace(limited, strategy=AUTO)


def _host_bytes(cluster: Cluster) -> int:
    """Return the host memory of a node, or else of the machine in the price list.

    A kind of device without a listed machine has the smallest of the listed ones.
    """
    if cluster.host_bytes is not None:
        return cluster.host_bytes
    listed = prices()
    own = listed.get(cluster.device.name)
    per_device = own.host_bytes if own is not None else 0
    per_device = per_device or min(price.host_bytes for price in listed.values() if price.host_bytes)
    return per_device * cluster.devices_per_node
