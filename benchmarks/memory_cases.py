"""What validate_memory.py measures: a table of trainings, most informative first.

All combinations of the factors would be hundreds for each engine. These are some fifty of them, chosen one after the
other: the next is the one with the most pairs and triples of levels that no earlier one has. All pairs are there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product

from training_case import Case

STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
TORCH_STRATEGIES = ("ddp", "shard_grad_op", "fsdp")
NUM_RANKS = (8, 64, 1, 1024)
FACTORS = ("model", "strategy", "num_ranks", "precision", "recompute")

NUM_OURS = 52
NUM_TORCHS = 24

# Models of the catalogue, with the two batch sizes that are tried.
Models = Sequence[tuple[Case, tuple[int, int]]]
LARGE: Models = (
    (Case(model="gpt2-124m", batch=0, seq=1024), (4, 16)),
    (Case(model="gpt2-1.5b", batch=0, seq=1024), (1, 4)),
    (Case(model="llama-3.2-1b", batch=0, seq=2048), (1, 3)),
    (Case(model="vit-large", batch=0, image=224), (16, 64)),
    (Case(model="resnet50", batch=0, image=224), (32, 128)),
)
SMALL: Models = (
    (Case(model="gpt-tiny", batch=0, seq=32), (1, 2)),
    (Case(model="llama-tiny", batch=0, seq=32), (1, 2)),
    (Case(model="vit-digits", batch=0, image=8), (2, 4)),
    (Case(model="resnet-digits", batch=0, image=8), (2, 4)),
)


def all_cases(models: Models) -> list[Case]:
    """Return two rounds, each by the number of ranks, which needs its own process; what time cuts off matters least."""
    ours = _most_informative(_every_case(models), num_cases=NUM_OURS)
    torchs = [replace(case, engine="torch") for case in ours if case.strategy in TORCH_STRATEGIES][:NUM_TORCHS]
    rounds = [
        ours[: NUM_OURS // 2] + torchs[: NUM_TORCHS // 2],
        ours[NUM_OURS // 2 :] + torchs[NUM_TORCHS // 2 :] + _other_optimizers(ours),
    ]
    return [case for cases in rounds for case in sorted(cases, key=lambda case: NUM_RANKS.index(case.num_ranks))]


def _every_case(models: Models) -> list[Case]:
    return [
        replace(
            model,
            strategy=strategy,
            num_ranks=num_ranks,
            precision=precision,
            recompute=recompute,
            batch=batches[which],
        )
        for (model, batches), strategy, num_ranks, precision, recompute, which in product(
            models, STRATEGIES, NUM_RANKS, ("bf16", "fp32"), ("none", "full"), (0, 1)
        )
    ]


def _most_informative(cases: Sequence[Case], *, num_cases: int) -> list[Case]:
    """Choose greedily. A pair counts as much as all triples of a case, so that pairs are complete first."""
    largest = {case.model: max(other.batch for other in cases if other.model == case.model) for case in cases}
    tells = {case: _groups(case, is_largest=case.batch == largest[case.model]) for case in cases}
    known: set[tuple[object, ...]] = set()
    chosen: list[Case] = []

    def news(case: Case) -> int:
        return sum(20 if len(group) == 2 else 1 for group in tells[case] - known)

    while tells and len(chosen) < num_cases:
        best = max(tells, key=news)
        chosen.append(best)
        known |= tells.pop(best)
    return chosen


def _groups(case: Case, *, is_largest: bool) -> set[tuple[object, ...]]:
    """Return the pairs and triples of a case's levels."""
    named = list(enumerate((*(getattr(case, factor) for factor in FACTORS), is_largest)))
    return {group for size in (2, 3) for group in combinations(named, size)}


def _other_optimizers(cases: Iterable[Case]) -> list[Case]:
    """Return a few with AdamW's foreach implementation, whose temporaries are its own, and with SGD."""
    plain = [case for case in cases if case.recompute == "none"]
    return [replace(case, optimizer=("adamw-foreach", "sgd")[number % 2]) for number, case in enumerate(plain[:7])]


def two_rank_cases(models: Models) -> list[Case]:
    """Return cases for two real ranks and a rehearsal of them."""
    model, batches = models[0]
    fsdp = replace(model, strategy="fsdp", num_ranks=2, batch=batches[0])
    return [fsdp, replace(fsdp, strategy="zero2", precision="fp32"), replace(fsdp, engine="torch")]
