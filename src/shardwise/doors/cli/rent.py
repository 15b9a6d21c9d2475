"""`shardwise rent`: which GPUs to rent for a training, with the plan, the days and the cost of each."""

import json
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.collection import without_collection
from shardwise.base.vocabulary.quantities import SIZE_EXAMPLE
from shardwise.doors.cli.plan_options import check_names, parse_count, parse_host_memory
from shardwise.doors.cli.shared_options import (
    AsJson,
    LoraRank,
    LoraTargets,
    Optimizer,
    Precision,
    Quantize,
    SampleLength,
    SavedPlan,
    Units,
)
from shardwise.doors.cli.terminal import status_line
from shardwise.plan.patterns import AUTO_UNITS

if TYPE_CHECKING:
    from shardwise.hardware.prices import Price
    from shardwise.planner.search.rent import Wish
    from shardwise.planner.search.training_cost import TrainingCost


def rent(
    model: Annotated[str, Argument(help="A catalogue name, hf:DIR or python:FILE.py:function.")],
    tokens: Annotated[str, Option(help="Tokens to train on, such as 2B.")],
    max_price: Annotated[float | None, Option(min=0, help="The most that the training may cost, in dollars.")] = None,
    max_days: Annotated[float | None, Option(min=0, help="The most days that it may take.")] = None,
    price: Annotated[
        list[str] | None,
        Option(metavar="KIND=PRICE", help="Dollars per GPU-hour of a kind, such as h100-80gb=2.5; may be repeated."),
    ] = None,
    seq: SampleLength = None,
    host_memory: Annotated[
        str | None,
        Option(
            "--host-memory-per-gpu",
            help=f"Host memory per GPU that a plan may use, such as {SIZE_EXAMPLE}; 0: none (default: as listed).",
        ),
    ] = None,
    precision: Precision = "bf16",
    units: Units = AUTO_UNITS,
    lora: LoraRank = None,
    lora_targets: LoraTargets = None,
    quantize: Quantize = None,
    optimizer: Optimizer = "adamw",
    every: Annotated[bool, Option("--all", help="Show every kind and count that fits, not the best few.")] = False,
    as_json: AsJson = False,
    save: SavedPlan = None,
) -> None:
    """Rank GPUs to rent for a training, each with its best plan, days and cost."""
    check_names(optimizer=optimizer)
    from shardwise.hardware.device import device_of
    from shardwise.hardware.prices import prices
    from shardwise.measure.report.text.rented import rental_data
    from shardwise.models.reference import Model
    from shardwise.models.specs.spec_request import adaptation_of
    from shardwise.plan import Plan
    from shardwise.planner.search.rent import LOOKS, Wish, recommended, rentals

    num_tokens = parse_count(tokens, option="--tokens")
    assert num_tokens is not None
    adaptation = adaptation_of(lora, targets=lora_targets, quantize=quantize)
    named = Model(model, seq=seq, adaptation=adaptation, while_tracing=lambda name: status_line(f"Tracing {name} …"))
    plan = Plan(precision=precision, units=units)
    if not named.spec_for(plan).traces:
        raise InvalidPlan(f"{model}: only its number of parameters is known, so there is no speed and no cost")
    wish = Wish(
        plan=plan,
        num_tokens=num_tokens,
        optimizer=optimizer,
        max_price=max_price,
        max_days=max_days,
    )
    host_bytes = parse_host_memory(host_memory, option="--host-memory-per-gpu")
    listed = prices(price or (), host_bytes=host_bytes)
    named_kinds = [name for name, one in listed.items() if not one.date]
    devices = {device_of(kind): one for kind, one in listed.items()}
    # Looking for garbage would take a tenth of the time.
    with status_line(f"Planning {model} on {len(devices)} kinds of GPU …"), without_collection():
        found = rentals(named.spec_for, devices=devices, wish=wish, looks=None if every else LOOKS, named=named_kinds)
    best = recommended(found, wish=wish)
    if as_json:
        rows = [rental_data(one, price=listed[one.candidate.cluster.device.name]) for one in found]
        print(json.dumps({"model": model, "recommended": None if best is None else 0, "rentals": rows}, indent=2))
    else:
        given = {"--lora": lora, "--lora-targets": lora_targets, "--quantize": quantize}
        given |= {"--units": quote(plan.units)} if plan.units != AUTO_UNITS else {}
        words = [model, *(f"{option} {value}" for option, value in given.items() if value is not None)]
        _show(" ".join(words), found, best=best, wish=wish, listed=listed)
    if best is None:
        raise Exit(1)
    if save is not None:
        best.candidate.plan.for_any_ranks.save(save)


def _show(
    model: str, found: "list[TrainingCost]", *, best: "TrainingCost | None", wish: "Wish", listed: "dict[str, Price]"
) -> None:
    from rich.console import Console

    from shardwise.measure.report.text.budgets import large_number
    from shardwise.measure.report.text.rented import remarks, rental_table

    console = Console()

    def say(text: str, **options: Any) -> None:
        console.print(text, highlight=False, markup=False, **options)

    if found:
        first = found[0].candidate
        say(
            f"{model}, {large_number(wish.num_tokens)} tokens in samples of {first.seq}: {first.plan.precision}, "
            f"{wish.optimizer}, engine {first.plan.engine}"
        )
        console.print(rental_table(found, recommended=best))
    for line in remarks(found, model=model, recommended=best, wish=wish, listed=listed):
        say(line, soft_wrap=True)
