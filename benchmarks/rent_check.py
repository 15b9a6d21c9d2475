"""Whether `shardwise rent` finds what an exhaustive search finds: ten models, three budgets each.

    python benchmarks/rent_check.py [MODEL …]

`rent` runs the allocator's model only for the rentals that are best without it. The exhaustive search runs it for every
kind of device and count, strategy, recompute mode and mesh. Budgets: none; 1.2 times the lowest cost; half of the
days of the cheapest rental. Exits with 1 if a recommendation differs.
"""

import sys
from dataclasses import replace

from rows import table

from shardwise.hardware.device import device_of
from shardwise.hardware.prices import prices
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.rent import Wish, most_cost, most_days, recommended, rentals
from shardwise.planner.search.training_cost import TrainingCost

MODELS = (
    *("gpt2-124m", "gpt2-350m", "smollm2-360m", "gpt-1.3b", "llama-3.2-1b"),
    *("llama-2-7b", "llama-3.1-8b", "mpt-7b", "llama-2-13b", "llama-3.1-70b"),
)
NUM_TOKENS = 2e9


def wishes(every: list[TrainingCost]) -> dict[str, Wish]:
    anything = Wish(plan=Plan(precision="bf16"), num_tokens=NUM_TOKENS)
    cheapest = min(every, key=most_cost)
    return {
        "none": anything,
        "price": replace(anything, max_price=1.2 * most_cost(cheapest)),
        "days": replace(anything, max_days=0.5 * most_days(cheapest)),
    }


def check(model: str) -> list[list[str]]:
    spec_for = Model(model).spec_for
    devices = {device_of(kind): price for kind, price in prices().items()}
    every = rentals(
        spec_for, devices=devices, wish=Wish(plan=Plan(precision="bf16"), num_tokens=NUM_TOKENS), looks=None
    )
    rows = []
    for name, wish in wishes(every).items():
        found = recommended(rentals(spec_for, devices=devices, wish=wish), wish=wish)
        best = recommended(every, wish=wish)
        if best is None and found is not None and found.candidate.cluster.num_nodes > 1:
            # One machine is too slow; the exhaustive search of several is a separate one.
            best = recommended(rentals(spec_for, devices=devices, wish=wish, looks=None), wish=wish)
        is_same = found == best
        rows.append([model, name, text(found), text(best), "yes" if is_same else "no"])
    return rows


def text(one: TrainingCost | None) -> str:
    if one is None:
        return "nothing"
    plan = one.candidate.plan
    return f"{one.candidate.cluster} {plan.strategy}, {plan.recompute}, {one.candidate.batch}: ${one.cost:,.2f}"


def main() -> None:
    rows = []
    for model in sys.argv[1:] or MODELS:
        rows += check(model)
        print(table(("model", "budget", "rented", "exhaustive", "same"), rows[-3:]), flush=True)
    same = sum(row[-1] == "yes" for row in rows)
    print(f"{same} of {len(rows)} are the same.")
    sys.exit(same < len(rows))


if __name__ == "__main__":
    main()
