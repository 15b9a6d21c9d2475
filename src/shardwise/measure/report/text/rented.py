"""Rentals as a table, as JSON, and in sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from shardwise.base.vocabulary.quantities import GIB, digits, fixed, significant
from shardwise.hardware.prices import Price
from shardwise.measure.report.text.plain_table import plain_table
from shardwise.measure.report.text.verdict import in_host_memory, name_of
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.rent import COUNTS, MACHINES, Wish, most_cost, most_days
from shardwise.planner.search.training_cost import TrainingCost

_HEADS = ("", "rent", "plan", "batch", GIB.name, "fits", "tokens/s", "days", "cost $", "±")


def rental_table(found: Sequence[TrainingCost], *, recommended: TrainingCost | None) -> Table:
    table = plain_table(_HEADS, right=("batch", GIB.name, "tokens/s", "days", "cost $", "±"), wraps=("plan",), gap=1)
    for one in found:
        candidate = one.candidate
        table.add_row(
            "▶" if one is recommended else "",
            str(candidate.cluster),
            _plan_text(candidate),
            str(candidate.batch),
            fixed(candidate.memory.device_bytes, unit=GIB),
            candidate.fits,
            digits(one.tokens_per_day / 86_400),
            significant(one.days, num_digits=2),
            f"{one.cost:,.0f}",
            f"{candidate.time_band.value:.0%}" if candidate.time_band.is_of_a_measured_kind else "–",
        )
    return table


def rental_data(one: TrainingCost, *, price: Price) -> dict[str, Any]:
    candidate = one.candidate
    return {
        "cluster": str(candidate.cluster),
        "price_per_gpu_hour": price.per_gpu_hour,
        "price_source": price.source,
        "price_date": price.date or None,
        "plan": candidate.plan.to_dict(),
        "fits": candidate.fits,
        "device_bytes": candidate.memory.device_bytes,
        "node_host_bytes": candidate.node_host_bytes,
        "tokens_per_s": one.tokens_per_day / 86_400,
        "days": one.days,
        "gpu_hours": one.gpu_hours,
        "cost": one.cost,
        "time_band": candidate.time_band.value,
    }


def remarks(
    found: Sequence[TrainingCost],
    *,
    model: str,
    recommended: TrainingCost | None,
    wish: Wish,
    listed: Mapping[str, Price],
) -> Iterator[str]:
    """Yield the recommendation, the command that shows its plan, and where the prices are from."""
    if recommended is None:
        yield _nothing(found, model=model, wish=wish)
    else:
        candidate = recommended.candidate
        price = listed[candidate.cluster.device.name]
        read = f" on {price.date}" if price.date else ""
        yield (
            f"Rent {candidate.cluster}: {_plan_text(candidate)}{in_host_memory(candidate)}, "
            f"{_days_text(recommended.days)} and "
            f"${recommended.cost:,.0f} at ${price.per_gpu_hour:.2f} per GPU-hour ({price.source}{read})."
        )
        yield f"Its plan: shardwise plan {model} {_options(candidate)} --save plan.toml"
    yield from _unmeasured(found)
    shown = {one.candidate.cluster.device.name for one in found}
    for kind in [name for name, price in listed.items() if not price.date and name not in shown]:
        yield f"{kind}: nothing fits on 1 to {COUNTS[-1]} of them."
    yield (
        "Predicted, not measured. Ranks and limits count days and cost at the upper end of their error (±). Steps "
        "only: no evaluations, checkpoints, failures or storage. --price KIND=PRICE sets another price."
    )


def _unmeasured(found: Sequence[TrainingCost]) -> Iterator[str]:
    """Say between which speeds a kind may be on which nothing was measured, for the best rental of each."""
    seen = set[str]()
    for one in found:
        band, kind = one.candidate.time_band, one.candidate.cluster.device.name
        if not band.is_of_a_measured_kind and kind not in seen:
            seen.add(kind)
            rate = one.tokens_per_day / 86_400
            speeds = f"between {digits(rate / (1 + band.upper))} and {digits(rate / (1 - band.lower))} tokens/s"
            yield f"– : not measured on this kind: {one.candidate.cluster} makes {speeds}."


def _nothing(found: Sequence[TrainingCost], *, model: str, wish: Wish) -> str:
    if not found:
        return f"Nothing fits: no kind of GPU in the price list can train {model} on {MACHINES[-1]} machines."
    limits = [f"${wish.max_price:,.0f}"] if wish.max_price is not None else []
    limits += [_days_text(wish.max_days)] if wish.max_days is not None else []
    nearest = (min(found, key=most_cost), min(found, key=most_days))
    ways = [
        f"{one.candidate.cluster} takes up to {_days_text(most_days(one))} and ${most_cost(one):,.0f}"
        for one in nearest
    ]
    return f"Nothing is done within {' and '.join(limits)}: {'; '.join(dict.fromkeys(ways))}."


def _plan_text(candidate: Candidate) -> str:
    recompute = candidate.plan.recompute
    host = ", host memory" if candidate.memory.host_bytes else ""
    return name_of(candidate) + (f", recompute {recompute}" if recompute != "none" else "") + host


def _options(candidate: Candidate) -> str:
    """Return the options with which `shardwise plan` finds the plan of a rental."""
    plan, cluster = candidate.plan, candidate.cluster
    if candidate.label:
        host_memory = f"{(cluster.host_bytes or 0) >> 30}{GIB.name}"
        return f"--cluster {cluster} --strategy {candidate.label} --host-memory {host_memory}"
    recompute = f" --recompute {plan.recompute}" if plan.recompute != "none" else ""
    return f"--cluster {cluster} --strategy {plan.strategy}{recompute}"


def _days_text(days: float) -> str:
    units = {"days": days, "hours": 24 * days, "minutes": 24 * 60 * days}
    unit = next((unit for unit, number in units.items() if number >= 1), "minutes")
    return f"{significant(units[unit], num_digits=2)} {unit}"
