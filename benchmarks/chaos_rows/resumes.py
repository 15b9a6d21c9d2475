"""Rows 8 and 9: which samples a run has seen that was stopped and resumed; evaluation of few samples on many ranks."""

from typing import Any

import torch
from ranks import run_ranks
from scorecard import Asked, Tally
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_tasks import assert_seen_once_per_epoch, config, reference, trained

import shardwise
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.training.loop.batches import Sharing
from shardwise.training.loop.evaluation import evaluate

_NUM_EPOCHS = 4
_MOST_STOPS_PER_RUN = 10
WIDTH, NUM_CLASSES, MOST_SAMPLES = 6, 3, 64


def stops_and_resumes(asked: Asked) -> Tally:
    """Runs of 4 epochs, each stopped up to 10 times; 1 to 4 ranks from one start to the next."""
    tally = Tally()
    total = asked.pick(short=40, long=100)
    num_runs = 0
    while tally.tried < total:
        num_runs += 1
        folder = asked.folder / str(num_runs)
        strategy = asked.chance.choice(list(STRATEGIES))
        every = asked.chance.randint(1, 3)
        train_config = config(
            folder,
            task={"model": reference("table")},
            plan={"strategy": strategy, "micro_batch": asked.chance.randint(1, 2)},
            optimizer={"name": "sgd", "lr": 1.0},
            schedule={"name": "constant"},
            train={"epochs": _NUM_EPOCHS, "clip_norm": 0},
            checkpoint={"every": every},
        )
        stops: list[str] = []
        with tally.trying(f"run {num_runs}, {strategy}", count=0):
            _run_with_stops(train_config, every=every, asked=asked, stops=stops, most=total - tally.tried)
            assert_seen_once_per_epoch(folder, num_epochs=_NUM_EPOCHS)
            tally.held += len(stops)
        tally.tried += max(1, len(stops))
        if stops:
            print(f"  run {num_runs}, {strategy}: {', '.join(stops)}", flush=True)
    tally.found["runs"] = num_runs
    return tally


def _run_with_stops(train_config: Any, *, every: int, asked: Asked, stops: list[str], most: int) -> None:
    """Start it until it has ended: each start but the last crashes on all ranks, one to three steps after a save."""
    saved = 0
    while True:
        num_ranks = asked.chance.randint(1, 4)
        may_stop = len(stops) < min(_MOST_STOPS_PER_RUN, most)
        crash_after = saved + asked.chance.randint(1, 2 + every) if may_stop else None
        ended = run_ranks(trained, num_ranks=num_ranks, args=(train_config, crash_after), timeout_seconds=120.0)
        if ended[0].outcome is not None:
            return
        stops.append(f"{num_ranks} ranks to step {crash_after}")
        saved = crash_after // every * every


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return MOST_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, torch.tensor(index)


def sums(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    x, index = batch
    out = model(x)
    correct = out.argmax(-1) == index % NUM_CLASSES
    loss = nn.functional.cross_entropy(out, index % NUM_CLASSES, reduction="sum")
    return {"count": torch.tensor(float(len(x))), "accuracy": correct.sum(), "index": index.sum(), "loss": loss}


def evaluations(rank: int, num_ranks: int, strategy: str, micro_batch: int) -> list[dict[str, float]]:
    """The metrics of 1, 2, … 64 samples, under a prepared model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, NUM_CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, precision="native", units="leaf"))
    sharing = Sharing(rank=rank, num_ranks=num_ranks, micro_batch=micro_batch, accumulate=1, num_samples=None)
    cpu = torch.device("cpu")
    return [
        evaluate(model, sums, Points(), sharing=sharing, device=cpu, num_samples=num_samples)
        for num_samples in range(1, MOST_SAMPLES + 1)
    ]


def evaluation(asked: Asked) -> Tally:
    """What is counted is equal to the last bit; a loss, which is added up in another order, to 1e-12."""
    tally = Tally()
    (expected,) = run_ranks(evaluations, num_ranks=1, args=(1, "ddp", 1), timeout_seconds=120.0)
    strategies = list(STRATEGIES) if asked.long else asked.chance.sample(list(STRATEGIES), 2)
    for num_ranks in (1, 2, 3, 4):
        for strategy in strategies:
            args = (num_ranks, strategy, asked.chance.randint(1, 5))
            results = run_ranks(evaluations, num_ranks=num_ranks, args=args, timeout_seconds=240.0)
            for num_samples in range(1, MOST_SAMPLES + 1):
                with tally.trying(f"{num_samples} samples on {num_ranks} ranks, {strategy}"):
                    for result in results:
                        assert_same_metrics(result[num_samples - 1], expected[num_samples - 1])
    return tally


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys() == {"accuracy", "index", "loss"}
    assert (found["accuracy"], found["index"]) == (expected["accuracy"], expected["index"]), f"{found} | {expected}"
    assert abs(found["loss"] - expected["loss"]) <= 1e-12 * expected["loss"], f"{found} | {expected}"
