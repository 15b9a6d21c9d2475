"""The core stays small: few lines, few attributes, and no method that only forwards."""

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
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.engine import core
from shardwise.engine.core.core import Core
from shardwise.engine.engine import engine_of
from shardwise.plan.placement import STRATEGIES

CORE = Path(core.__file__).parent
SOURCE = Path(shardwise.__file__).parent


def test_the_core_has_at_most_5000_lines_in_35_files() -> None:
    files = list(CORE.rglob("*.py"))
    assert len(files) <= 35
    assert sum(len(path.read_text().splitlines()) for path in files) <= 5000


def test_a_core_takes_three_arguments() -> None:
    assert list(inspect.signature(Core).parameters) == ["model", "units", "setting"]


def test_no_method_of_the_core_only_forwards() -> None:
    """To the method of that name, with the arguments that it was given."""
    (core,) = (node for node in ast.parse((CORE / "core.py").read_text()).body if isinstance(node, ast.ClassDef))
    methods = [node for node in core.body if isinstance(node, ast.FunctionDef)]
    assert len(methods) <= 36
    assert [method.name for method in methods if forwards(method)] == []


def forwards(method: ast.FunctionDef) -> bool:
    (*rest, last) = [node for node in method.body if not (isinstance(node, ast.Expr) and is_text(node.value))]
    call = last.value if isinstance(last, ast.Return | ast.Expr) else None
    called = call.func if isinstance(call, ast.Call) else call
    return not rest and isinstance(called, ast.Attribute) and called.attr.strip("_") == method.name.strip("_")


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Traced(AbsentCollectives):
    """Notes the frames of this package between autograd and the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, list[str]] = {}

    def _note(self, name: str) -> None:
        stack = (Path(frame.filename) for frame in traceback.extract_stack())
        frames = [str(path) for path in stack if path.is_relative_to(SOURCE)]
        start = max((i for i, name in enumerate(frames) if name.endswith("engine/hooks/step_hooks.py")), default=None)
        if start is None:
            return
        while start > 0 and frames[start - 1].endswith("engine/hooks/step_hooks.py"):
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
