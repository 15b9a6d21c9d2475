"""Copies on another node: whatever one node loses, the others have. Nodes are ranks that see different folders."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from protected import NUM_STEPS, Protected
from ranks import run_ranks
from test_recovery import damage, equal, newest
from whole import whole

from reliability.said import say
from shardwise.comm.job.job_environment import MEMORY
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

FSDP = Plan(strategy="fsdp")
# Ranks 0 and 1 are on the first node.
NODES = ("a", "a", "b", "b")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory with one folder per node."""
    path = Path(f"/dev/shm/test-buddies-{os.getpid()}")
    shutil.rmtree(path, ignore_errors=True)
    for node in "abc":
        (path / node).mkdir(parents=True)
    yield path
    shutil.rmtree(path)


def on_nodes(
    rank: int, memory: Path, folder: Path, nodes: str, plan: Plan, after: int, states: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Train up to a step with each rank's node as `nodes` says, one letter per rank."""
    os.environ[MEMORY] = str(memory / nodes[rank])
    try:
        training = Protected(plan, folder=folder)
        first, kept, losses = training.run.step, {}, {}
        for number in range(first + 1, after + 1):
            losses[number] = training.step(number)
            if number in states:
                kept[number] = training.state()
        at_end = training.state()
        sent = training.run._recovery._snapshots.buddies
        training.run.release()
        num_sent = None if sent is None else sent.num_bytes
        return {
            "first": first,
            "losses": losses,
            "states": kept,
            "end": at_end,
            "told": training.told,
            "sent": num_sent,
        }
    finally:
        del os.environ[MEMORY]


def trained(memory: Path, folder: Path, nodes: str, plan: Plan, after: int, states: tuple[int, ...] = ()) -> list[Any]:
    return run_ranks(on_nodes, num_ranks=len(nodes), args=(memory, folder, nodes, plan, after, states))


def lose(node: Path) -> None:
    shutil.rmtree(node)
    node.mkdir()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", ["a", *whole("b")])
@pytest.mark.parametrize(
    "plan", [FSDP, *whole(Plan(strategy="ddp"), Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=2)))],
    ids=lambda plan: f"{plan.strategy} {plan.mesh is not None}",
)  # fmt: skip
def test_after_the_loss_of_a_node_a_new_one_continues_bit_for_bit(
    memory: Path, tmp_path: Path, plan: Plan, lost: str
) -> None:
    alone = trained(memory, tmp_path / "alone", "aabb", plan, NUM_STEPS)
    begun = trained(memory, tmp_path / "run", "aabb", plan, 6)
    lose(memory / lost)
    again = trained(memory, tmp_path / "run", "aabb".replace(lost, "c"), plan, NUM_STEPS)
    for one, before, after in zip(alone, begun, again, strict=True):
        assert after["first"] == newest(6)
        assert {**before["losses"], **after["losses"]} == one["losses"]
    assert equal(again[0]["end"], alone[0]["end"])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", ["b", *whole("a")])
def test_the_other_node_continues_alone(memory: Path, tmp_path: Path, lost: str) -> None:
    step = newest(6)
    begun = trained(memory, tmp_path, "aabb", FSDP, 6, (step,))
    lose(memory / lost)
    again = trained(memory, tmp_path, "aabb".replace(lost, ""), FSDP, step)
    assert again[0]["first"] == step
    assert equal(again[0]["end"], begun[0]["states"][step])


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "shared"),
    [(Plan(strategy="ddp"), True), (Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=2)), True), (FSDP, False)],
    ids=["ddp", "hybrid", "fsdp"],
)
def test_what_another_node_holds_anyway_is_not_sent(memory: Path, tmp_path: Path, plan: Plan, shared: bool) -> None:
    training = trained(memory, tmp_path, "aabb", plan, 2)
    state = sum(value.numel() * value.element_size() for value in training[0]["end"]["model"].values())
    for rank in training[1:]:
        # Its random states go in any case.
        own = 5056 + 64
        assert (rank["sent"] <= own) == shared
        assert rank["sent"] < own + 4 * state


@pytest.mark.timeout(180)
def test_in_place_of_damaged_data_the_buddys_copy_is_taken(memory: Path, tmp_path: Path) -> None:
    step = newest(6)
    begun = trained(memory, tmp_path, "ab", FSDP, 6, (step,))
    for path in (memory / "a").rglob("*.own.state"):
        damage(path)
    again = trained(memory, tmp_path, "ab", FSDP, step)
    assert again[0]["first"] == step
    assert equal(again[0]["end"], begun[0]["states"][step])
    assert any("the snapshot of rank 0, step 5, is damaged: " in line for line in again[0]["told"])


@pytest.mark.timeout(180)
def test_without_both_copies_nothing_is_loaded_and_a_line_says_so(memory: Path, tmp_path: Path) -> None:
    trained(memory, tmp_path, "ab", FSDP, 6)
    lose(memory / "a")
    for path in (memory / "b").rglob("*.copy.state"):
        damage(path)
    again = trained(memory, tmp_path, "cb", FSDP, 1)
    assert again[0]["first"] == 0
    assert "the snapshot of step 5 is not whole in memory: what rank 0 of 2 wrote is missing" in again[0]["told"]
    say(again[0]["told"][-1])
