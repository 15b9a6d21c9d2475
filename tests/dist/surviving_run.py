"""Trainings with `shardwise.step` that run out of memory where they are told to; importable by ranks, of a GPU too."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import GPT, MODELS, OPTIMIZERS, make_tokens
from running_out import Point, RunsOut
from torch import Tensor, nn

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan
from shardwise.tasks import cross_entropy

NUM_STEPS = 6
PASSES = 2
MAKE = {"gpt": partial(make_tokens, replace(GPT, dropout=0.2)), "resnet": MODELS["resnet"]}


def points_of(seed: int, *, num_ranks: int) -> list[Point]:
    """Three steps that fail, anywhere in them; some on two ranks."""
    draw = random.Random(seed)
    return [
        Point(
            rank=rank,
            step=step,
            number=draw.randrange(PASSES),
            place=draw.random(),
            phase=draw.choice(("forward", "backward")),
        )
        for step in sorted(draw.sample(range(NUM_STEPS), 3))
        for rank in draw.sample(range(num_ranks), min(num_ranks, draw.choice((1, 1, 2))))
    ]


class Run:
    """Steps of a model that may run out of memory."""

    def __init__(
        self,
        name: str,
        optimizer: str,
        plan: Plan,
        points: list[Point],
        *,
        rank: int,
        survive: int = 3,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(1234 + rank)
        self.rank, self.device = rank, device
        self.model, self.batch = MAKE[name]()
        self.model.to(device)
        self.out = RunsOut(self.model, points, rank=rank)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        shardwise.prepare(self.model, self.optimizer, plan)
        self.said: list[str] = []
        self.scaler = shardwise.GradScaler(device, enabled=plan.precision == "fp16", init_scale=2.0**10)
        self.step = shardwise.step(
            self.model,
            self.optimizer,
            self.loss,
            max_norm=None if self.scaler.is_enabled() else 0.5,
            scaler=self.scaler,
            tell=self.said.append,
            survive=survive,
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        *given, self.out.now = batch
        return cross_entropy(model, tuple(tensor.to(self.device) for tensor in given))

    def take(self, step: int) -> float:
        return self.step(
            *((*self.batch(10 * step + number, self.rank), (step, number)) for number in range(PASSES))
        ).item()

    def result(self) -> Any:
        drawn = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if self.device == "cuda" else [])
        return shardwise.full_state_dict(self.model, self.optimizer), self.scaler.state_dict(), drawn


def survived(
    rank: int, name: str, optimizer: str, plan: Plan, points: list[Point], device: str = "cpu"
) -> tuple[list[Plan], list[str], Any]:
    """(The plan of each step, what was said, losses and states)."""
    run = Run(name, optimizer, plan, points, rank=rank, device=device)
    plans, losses = [], []
    for step in range(NUM_STEPS):
        losses.append(run.take(step))
        plans.append(engine_of(run.model).plan)
    assert not run.out.left
    return plans, run.said, (losses, run.result())


def expected(rank: int, name: str, optimizer: str, plan: Plan, plans: list[Plan], device: str = "cpu") -> Any:
    """The same without a failure, given the smaller plans before the steps that failed."""
    run = Run(name, optimizer, plan, [], rank=rank, survive=0, device=device)
    losses = []
    for step in range(NUM_STEPS):
        shardwise.replan(run.model, plans[step])
        losses.append(run.take(step))
    return losses, run.result()
