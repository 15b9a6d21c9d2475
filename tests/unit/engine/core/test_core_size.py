"""The core stays small, and nothing looks into how it runs a step."""

import ast
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Plan
from shardwise.comm.absent import AbsentCollectives, absent_group
from shardwise.engine import core
from shardwise.engine.core.runner import Runner
from shardwise.engine.engine import engine_of
from shardwise.plan.placement import STRATEGIES

CORE = Path(core.__file__).parent
SOURCE = Path(shardwise.__file__).parent


def test_the_core_has_at_most_5000_lines_in_35_files() -> None:
    files = list(CORE.rglob("*.py"))
    assert len(files) <= 35
    assert sum(len(path.read_text().splitlines()) for path in files) <= 5000


def test_a_runner_takes_at_most_six_arguments() -> None:
    assert len(inspect.signature(Runner).parameters) <= 6


def test_nothing_outside_the_core_reads_a_runners_attributes() -> None:
    """Neither by its class nor by the attribute under which the core keeps it."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if path.is_relative_to(CORE) or "runner" not in text.lower():
            continue
        tree = ast.parse(text)
        imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert "Runner" not in imported, path
        attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert not {"runner", "_runner"}.intersection(attributes), path


class Traced(AbsentCollectives):
    """Notes the frames of this package between autograd and the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, list[str]] = {}

    def _note(self, name: str) -> None:
        stack = (Path(frame.filename) for frame in traceback.extract_stack())
        frames = [str(path) for path in stack if path.is_relative_to(SOURCE)]
        start = max((i for i, name in enumerate(frames) if name.endswith("program/hooks.py")), default=None)
        if start is None:
            return
        while start > 0 and frames[start - 1].endswith("program/hooks.py"):
            start -= 1
        self.paths[name] = frames[start:]

    def all_gather(self, *arguments, **options):  # type: ignore[no-untyped-def]
        self._note("gather")
        return super().all_gather(*arguments, **options)

    def reduce_scatter(self, *arguments, **options):  # type: ignore[no-untyped-def]
        self._note("reduce")
        return super().reduce_scatter(*arguments, **options)


@pytest.fixture
def _two_ranks() -> Iterator[None]:
    with absent_group(2):
        yield


@pytest.mark.usefixtures("_two_ranks")
def test_from_autograds_hook_to_a_collective_are_at_most_six_frames_in_three_files() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = Traced()
    plan = Plan(strategy="fsdp", units="class:Linear", prefetch=0)
    shardwise.prepare(model, optimizer, plan, collectives=collectives)
    for _ in range(2):
        collectives.paths.clear()
        loss = model(torch.ones(2, 8)).sum()
        # Only what backward issues.
        collectives.paths.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert collectives.paths.keys() == {"gather", "reduce"}
    for frames in collectives.paths.values():
        assert len(frames) <= 6
        assert len(set(frames)) <= 3


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_rank_that_is_alone_hands_nothing_to_the_backend_in_a_step(strategy: str) -> None:
    with absent_group(1):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = engine_of(model).core.setting.groups
        assert not any(group.log.issued for group in groups.by_name().values())
