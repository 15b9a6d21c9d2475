"""What validate_memory.py measures: a table of trainings, most informative first.

All combinations of the factors would be hundreds for each engine. These are some fifty of them, chosen one after the
other: the next is the one with the most pairs and triples of levels that no earlier one has. All pairs are there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any

STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
TORCH_STRATEGIES = ("ddp", "shard_grad_op", "fsdp")
NUM_RANKS = (8, 64, 1, 1024)
PRECISIONS = ("bf16", "fp32")
RECOMPUTES = ("none", "full")

NUM_OURS = 52
NUM_TORCHS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training. `num_ranks` = 1 is a real job of one rank, more of them a rehearsal of rank 0."""

    model: str
    engine: str = "shardwise"
    strategy: str
    num_ranks: int
    precision: str = "bf16"
    recompute: str = "none"
    batch: int
    seq: int | None = None
    image: int | None = None
    optimizer: str = "adamw-fused"

    def __str__(self) -> str:
        size = f"{self.batch} × {self.seq or self.image}"
        return (
            f"{self.model:13} {self.engine:9} {self.strategy:13} {self.num_ranks:4} ranks {self.precision} "
            f"{'recompute' if self.recompute == 'full' else '':9} {size:9} {self.optimizer:13}"
        )

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the catalogue, with the two batch sizes that are tried."""

    name: str
    batches: tuple[int, int]
    seq: int | None = None
    image: int | None = None


LARGE = (
    Model(name="gpt2-124m", batches=(4, 16), seq=1024),
    Model(name="gpt2-1.5b", batches=(1, 4), seq=1024),
    Model(name="llama-3.2-1b", batches=(1, 3), seq=2048),
    Model(name="vit-large", batches=(16, 64), image=224),
    Model(name="resnet50", batches=(32, 128), image=224),
)
SMALL = (
    Model(name="gpt-tiny", batches=(1, 2), seq=32),
    Model(name="llama-tiny", batches=(1, 2), seq=32),
    Model(name="vit-digits", batches=(2, 4), image=8),
    Model(name="resnet-digits", batches=(2, 4), image=8),
)


def all_cases(models: Sequence[Model]) -> list[Case]:
    """Two rounds, each by the number of ranks: a process is needed for each, and what time cuts off is missed least."""
    ours = _most_informative(_every_case(models), num_cases=NUM_OURS)
    torchs = [replace(case, engine="torch") for case in ours if case.strategy in TORCH_STRATEGIES][:NUM_TORCHS]
    rounds = [
        ours[: NUM_OURS // 2] + torchs[: NUM_TORCHS // 2],
        ours[NUM_OURS // 2 :] + torchs[NUM_TORCHS // 2 :] + _other_optimizers(ours),
    ]
    return [case for cases in rounds for case in sorted(cases, key=lambda case: NUM_RANKS.index(case.num_ranks))]


def _every_case(models: Sequence[Model]) -> list[Case]:
    factors = product(models, STRATEGIES, NUM_RANKS, PRECISIONS, RECOMPUTES, (0, 1))
    return [
        Case(
            model=model.name,
            strategy=strategy,
            num_ranks=num_ranks,
            precision=precision,
            recompute=recompute,
            batch=model.batches[which],
            seq=model.seq,
            image=model.image,
        )
        for model, strategy, num_ranks, precision, recompute, which in factors
    ]


def _most_informative(cases: Sequence[Case], *, num_cases: int) -> list[Case]:
    """Greedy. A pair counts as much as all triples of a case, so that pairs are complete first."""
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
    """The pairs and triples of a case's levels."""
    levels = (case.model, case.strategy, case.num_ranks, case.precision, case.recompute, is_largest)
    named = list(enumerate(levels))
    return {group for size in (2, 3) for group in combinations(named, size)}


def _other_optimizers(cases: Iterable[Case]) -> list[Case]:
    """A few with AdamW's foreach implementation, whose temporaries are its own, and with SGD."""
    plain = [case for case in cases if case.recompute == "none"]
    others = ("adamw-foreach", "sgd", "adamw-foreach", "sgd", "adamw-foreach", "sgd", "adamw-foreach")
    return [replace(case, optimizer=optimizer) for case, optimizer in zip(plain, others, strict=False)]


def two_rank_cases(models: Sequence[Model]) -> list[Case]:
    """For two real ranks and a rehearsal of them."""
    model = models[0]
    fsdp = Case(
        model=model.name, strategy="fsdp", num_ranks=2, batch=model.batches[0], seq=model.seq, image=model.image
    )
    return [fsdp, replace(fsdp, strategy="zero2", precision="fp32"), replace(fsdp, engine="torch")]


def missing_pairs(cases: Iterable[Case]) -> list[str]:
    """Pairs of levels that no case of our own engine has."""
    ours = [case.as_data() for case in cases if case.engine == "shardwise"]
    factors = ("model", "strategy", "num_ranks", "precision", "recompute")
    levels = {factor: sorted({str(case[factor]) for case in ours}) for factor in factors}
    missing = []
    for one, other in combinations(factors, 2):
        found = {(str(case[one]), str(case[other])) for case in ours}
        missing += [f"{a} with {b}" for a in levels[one] for b in levels[other] if (a, b) not in found]
    return missing


if __name__ == "__main__":
    for number, case in enumerate(all_cases(LARGE), start=1):
        print(f"{number:3} {case}")
    print("missing pairs:", ", ".join(missing_pairs(all_cases(LARGE))) or "none")
