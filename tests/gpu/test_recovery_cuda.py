"""Snapshots of a training on a GPU: copies that overlap with it, and what continues from them bit for bit."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graph_cases import Ran, deterministic, gpt_batch, run
from protected import NUM_STEPS, Protected
from test_recovery import equal, newest

import shardwise
from shardwise.plan import Plan
from shardwise.state.checkpoint.late_numbers import LateNumbers
from shardwise.state.checkpoint.typed import from_json
from shardwise.state.recovery import copying
from shardwise.state.recovery.copying import Copier, CopySource, pin, unpin
from shardwise.state.recovery.generation import DataFile
from shardwise.state.recovery.memory_folder import free_memory
from shardwise.state.recovery.memory_key import key_in

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(230)]

HERE = Path(__file__).parent
# More than any device has: nothing is staged.
NO_ROOM = 2**60


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for one in (tmp_path, *tmp_path.iterdir()):
        key = key_in(one) if one.is_dir() else None
        if key is not None:
            free_memory(key)


@pytest.mark.parametrize("margin", [0, NO_ROOM], ids=["staged", "straight"])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_copy_is_what_the_state_was_although_it_is_written_at_once(margin: int, pinned: bool) -> None:
    torch.manual_seed(0)
    kept = [torch.randn(3_000_017, device="cuda"), torch.randn(1_000_003, device="cuda").bfloat16()]
    buffer, on_host = torch.randn(1001, device="cuda"), torch.randn(77)
    begins = [0, 12_000_128, 14_000_192, 14_004_224]
    elements = [*kept, buffer, on_host]
    wanted = [one.cpu().clone() for one in elements]
    count = torch.tensor(41.0, device="cuda")
    file = DataFile(Path(f"/dev/shm/test-copying-{os.getpid()}"), num_bytes=14_004_224 + 320)
    file.path.unlink()
    assert not pinned or pin(file.memory)
    copier = Copier()
    with patch.object(copying, "_MARGIN_BYTES", margin):
        for _ in range(3):
            late = LateNumbers()
            place = late.to_json(count, what="count")
            sources = [
                CopySource(begin=begin, elements=one, early=one is buffer)
                for begin, one in zip(begins, elements, strict=True)
            ]
            begun = copier.begin(sources, memory=file.memory, numbers=late.copies())
            # A forward changes buffers and takes memory; an update changes the state.
            buffer.mul_(2)
            count.add_(1)
            noise = [torch.full((5_000_000,), float("nan"), device="cuda") for _ in range(4)]
            del noise
            # As the thread of a snapshot does; what is on the host may be written after it.
            finishing = threading.Thread(target=begun.finish)
            finishing.start()
            begun.release_sources()
            for one in (*kept, on_host):
                one.mul_(2)
            finishing.join()
            late.fill()
            for source, was in zip(sources, wanted, strict=True):
                assert torch.equal(source.within(file.memory).clone(), was)
            assert from_json(place).item() == float(count) - 1
            assert begun.lost_seconds(0.0) >= 0
            wanted = [one.cpu().clone() for one in elements]
    if pinned:
        torch.cuda.synchronize()
        unpin(file.memory)


@pytest.mark.parametrize("margin", [0, NO_ROOM], ids=["staged", "straight"])
@pytest.mark.usefixtures("one_rank")
def test_an_update_that_follows_at_once_does_not_reach_the_copy(margin: int) -> None:
    """Without a thread in between: the device alone keeps the order."""
    state = torch.zeros(200_000_000, device="cuda")
    file = DataFile(Path(f"/dev/shm/test-order-{os.getpid()}"), num_bytes=state.numel() * 4)
    file.path.unlink()
    assert pin(file.memory)
    copier = Copier()
    with patch.object(copying, "_MARGIN_BYTES", margin):
        for turn in range(1, 4):
            state.fill_(turn)
            begun = copier.begin([CopySource(begin=0, elements=state, early=False)], memory=file.memory)
            begun.release_sources()
            state.fill_(-1)
            begun.finish()
            assert bool((file.memory.view(torch.float32) == turn).all()), turn
    torch.cuda.synchronize()
    unpin(file.memory)


def stopped(folder: Path, plan: Plan, *, after: int, **options: Any) -> dict[str, Any]:
    training = Protected(plan, folder=folder, device="cuda:0", **options)
    first = training.run.step
    losses = {number: training.step(number) for number in range(first + 1, after + 1)}
    state = training.state()
    if after >= NUM_STEPS:
        training.run.close()
    training.run.release()
    return {"first": first, "losses": losses, "state": state}


@pytest.mark.parametrize("margin", [0, NO_ROOM], ids=["staged", "straight"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("plan", [Plan(), Plan(precision="bf16"), Plan(offload_states=True)], ids=str)
@pytest.mark.usefixtures("one_rank")
def test_what_continues_from_memory_is_bit_equal(
    folder: Path, plan: Plan, options: dict[str, bool], margin: int
) -> None:
    if plan.offload_states and options:
        pytest.skip("options of an optimizer on the device")
    with deterministic(), patch.object(copying, "_MARGIN_BYTES", margin):
        for name in ("alone", "run"):
            (folder / name).mkdir()
        alone = stopped(folder / "alone", plan, after=NUM_STEPS, **options)
        begun = stopped(folder / "run", plan, after=6, **options)
        again = stopped(folder / "run", plan, after=NUM_STEPS, **options)
    assert (alone["first"], begun["first"], again["first"]) == (0, 0, newest(6))
    assert {**begun["losses"], **again["losses"]} == alone["losses"]
    assert equal(again["state"], alone["state"])


@pytest.mark.parametrize("margin", [0, NO_ROOM], ids=["staged", "straight"])
@pytest.mark.usefixtures("one_rank")
def test_snapshots_between_replays_of_units_continue_bit_for_bit(folder: Path, margin: int) -> None:
    num_steps, stop = 24, 15

    def part(first: int, last: int, *, run_folder: Path) -> tuple[Ran, int]:
        protections: list[Any] = []

        def between(model: Any, optimizer: Any, step: int) -> None:
            if not protections:
                protections.append(shardwise.protect(model, optimizer, folder=run_folder, every=2))
            elif first + step > protections[0].step:
                protections[0].completed(first + step)

        ran = run(Plan(), steps=last - first, batch=lambda step: gpt_batch(first + step), between=between)
        began = protections[0].step
        protections[0].release()
        return ran, began

    with patch.object(copying, "_MARGIN_BYTES", margin):
        alone, _ = part(0, num_steps, run_folder=folder / "alone")
        begun, _ = part(0, stop, run_folder=folder / "run")
        assert begun.losses == alone.losses[:stop]
        assert begun.num_replayed > 0
        # The last snapshot: found by a training that takes no step.
        _, found = part(stop, stop + 1, run_folder=folder / "run")
        assert found > 6
        again, _ = part(found, num_steps, run_folder=folder / "run")
    assert again.losses == alone.losses[found:]
    assert all(torch.equal(again.weights[name], alone.weights[name]) for name in alone.weights)


@pytest.mark.parametrize("moment", ["backward", "update", "snapshot"])
def test_one_of_two_nccl_ranks_is_killed_and_the_end_is_bit_equal(folder: Path, moment: str) -> None:
    ends = []
    for name, kill in (("run", f"1 {moment} 6"), ("alone", "")):
        (folder / name).mkdir()
        launch(folder / name, kill=kill)
        ends.append(torch.load(folder / name / "end.pt"))
    assert ends[0]["first"] >= 3
    assert equal(ends[0]["state"], ends[1]["state"])
    killed = (folder / "run" / "killed").stat().st_mtime
    next_step = min(path.stat().st_mtime for path in (folder / "run").glob("began-*-1"))
    print(f"killed at {moment}: the next step began after {next_step - killed:.1f} s")
    assert next_step - killed < 20


def launch(folder: Path, *, kill: str) -> None:
    """Two ranks of our launcher; the one that is killed is started again, with the other."""
    paths = (str(HERE), str(HERE.parent / "dist"), str(HERE.parent), os.environ.get("PYTHONPATH"))
    words = ["fsdp", str(folder)]
    code = (
        "import sys; from pathlib import Path; from shardwise.training.launch.launch import launch; "
        f"sys.exit(launch({words!r}, num_ranks=2, max_restarts=1, folder=Path({str(folder / 'job')!r}), "
        f"program={str(HERE / 'recovery_rank.py')!r}))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "KILL": kill},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"after {time.monotonic() - began:.0f} s: {done.stdout[-3000:]}{done.stderr[-3000:]}"
