"""Recovery from memory: a training that is brought back continues bit for bit, on the same ranks and on others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import ranks_left
from protected import EVERY, NUM_STEPS, Protected
from ranks import RankFailed, run_ranks
from whole import strategies, whole

import shardwise
from reliability.said import say
from shardwise.comm.job.job_environment import MEMORY
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.state.recovery import generation
from shardwise.state.recovery.memory_folder import free_memory
from shardwise.state.recovery.memory_key import key_in
from shardwise.training.launch.launch import launch

HERE = Path(__file__).parent
PLANS = [
    Plan(strategy="fsdp"),
    Plan(strategy="ddp"),
    *whole(
        Plan(strategy="zero1", accumulate=2),
        Plan(strategy="zero2", precision="bf16"),
        Plan(strategy="shard_grad_op", precision="fp16"),
        Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=1)),
        Plan(strategy="fsdp", across="zero2", mesh=Mesh(replicate=2, shard=1)),
        Plan(strategy="fsdp", offload_states=True),
        Plan(strategy="ddp", engine="torch"),
        Plan(strategy="fsdp", engine="torch"),
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    key = key_in(tmp_path)
    if key is not None:
        free_memory(key)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def newest(step: int) -> int:
    """The newest snapshot after this step: the first one is of step 1."""
    return step - (step - 1) % EVERY


def stopped(rank: int, folder: Path, plan: Plan, *, after: int, states: tuple[int, ...] = (), **options: Any) -> Any:
    """Train up to a step; then this start is over, and its snapshots stay. Return where it began, losses and states."""
    training = Protected(plan, folder=folder, **options)
    first, kept, losses = training.run.step, {}, {}
    values = training.run.values
    for number in range(first + 1, after + 1):
        losses[number] = training.step(number)
        if number in states:
            kept[number] = training.state()
    at_end = training.state()
    if after >= NUM_STEPS:
        training.run.close()
    training.run.release()
    return {"first": first, "losses": losses, "states": kept, "end": at_end, "told": training.told, "values": values}


def stopped_and_continued(rank: int, folder: Path, plan: Plan) -> tuple[Any, Any, Any]:
    alone = stopped(rank, folder / "alone", plan, after=NUM_STEPS)
    begun = stopped(rank, folder, plan, after=6)
    return alone, begun, stopped(rank, folder, plan, after=NUM_STEPS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.strategy} {plan.precision} {plan.engine}")
def test_what_continues_from_memory_is_bit_equal_to_what_was_never_stopped(folder: Path, plan: Plan) -> None:
    results = run_ranks(stopped_and_continued, num_ranks=2, args=(folder, plan))
    for alone, begun, again in results:
        assert (alone["first"], begun["first"], again["first"]) == (0, 0, newest(6))
        assert {**begun["losses"], **again["losses"]} == alone["losses"]
        assert again["values"] == {"loss": alone["losses"][newest(6)]}
    # Of rank 0, whose buffers count: torch's engine leaves the others their own.
    alone, _, again = results[0]
    assert equal(again["end"], alone["end"])
    # Nothing is left in memory.
    key = key_in(folder)
    assert key is not None
    assert not Path("/dev/shm", f"shardwise-{key}").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", strategies("fsdp", "ddp"))
@pytest.mark.parametrize(("before", "after"), [(2, 1), *whole((2, 3), (3, 2), (1, 2))])
def test_it_continues_on_another_number_of_ranks(folder: Path, strategy: str, before: int, after: int) -> None:
    plan, step = Plan(strategy=strategy), newest(6)
    begun = run_ranks(stopped_at, num_ranks=before, args=(folder, plan, 6, (step,)))[0]
    for again in run_ranks(stopped_at, num_ranks=after, args=(folder, plan, step, ())):
        assert again["first"] == step
        assert equal(again["end"], begun["states"][step])


def stopped_at(rank: int, folder: Path, plan: Plan, after: int, states: tuple[int, ...], disk: bool = False) -> Any:
    return stopped(rank, folder, plan, after=after, states=states, disk=disk)


def replanned(rank: int, folder: Path) -> Any:
    """The plan changes between two snapshots, and the next start has the old one."""
    training = Protected(Plan(strategy="ddp"), folder=folder)
    for number in (1, 2, 3, 4):
        training.step(number)
    shardwise.replan(training.model, Plan(strategy="fsdp"))
    training.step(5)
    at_5 = training.state()
    training.step(6)
    training.run.release()
    return at_5, stopped(rank, folder, Plan(strategy="ddp"), after=5)


@pytest.mark.timeout(120)
def test_a_new_plan_between_two_snapshots_is_followed(folder: Path) -> None:
    # Of rank 0, whose buffers count.
    at_5, again = run_ranks(replanned, num_ranks=2, args=(folder,))[0]
    assert again["first"] == 5
    assert equal(again["end"], at_5)


# What is damaged, missing or does not fit


def files_in(folder: Path, *, ending: str) -> list[Path]:
    key = key_in(folder)
    assert key is not None
    return sorted(Path("/dev/shm", f"shardwise-{key}").glob(f"*{ending}"))


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.timeout(120)
def test_a_changed_byte_is_seen_and_the_other_generation_is_taken(folder: Path) -> None:
    plan = Plan(strategy="fsdp")
    begun = run_ranks(stopped_at, num_ranks=2, args=(folder, plan, 6, (3,)))[0]
    record = next(path for path in files_in(folder, ending=".json") if ".00000005.00001." in path.name)
    damage(record.with_name(generation.read_record(record.parent, generation.RecordName.parse(record.name)).data))
    again = run_ranks(stopped_at, num_ranks=2, args=(folder, plan, 3, ()))[0]
    assert again["first"] == 3
    assert equal(again["end"], begun["states"][3])
    assert "the snapshot of rank 1, step 5, is damaged: " in again["told"][0]
    assert again["told"][1] == "the snapshot of step 5 is not whole in memory: what rank 1 of 2 wrote is missing"
    assert again["told"][2] == "Loaded the snapshot of step 3 from memory"
    say(again["told"][0])


def saved_on_disk(rank: int, folder: Path, plan: Plan) -> Any:
    training = Protected(plan, folder=folder, disk=True)
    assert training.checkpoints is not None
    for number in range(1, 7):
        training.step(number)
        if number == 2:
            training.checkpoints.save(
                training.model, training.optimizer, step=2, ema=training.ema, **training.run.state({"loss": 0.5})
            )
            at_2 = training.state()
    training.checkpoints.close()
    training.run.release()
    return at_2


@pytest.mark.timeout(120)
def test_without_a_whole_generation_the_disk_is_used_and_one_line_says_what_is_lost(folder: Path) -> None:
    plan = Plan(strategy="fsdp")
    at_2 = run_ranks(saved_on_disk, num_ranks=2, args=(folder, plan))[0]
    for path in files_in(folder, ending=".json"):
        if ".00001." in path.name:
            path.unlink()
    again = run_ranks(stopped_at, num_ranks=2, args=(folder, plan, 2, (), True))[0]
    assert again["first"] == 2
    assert equal(again["end"], at_2)
    assert again["values"] == {"loss": 0.5}
    assert again["told"][-1] == "3 steps after step-00000002 were in memory only, and are computed again"


@pytest.mark.timeout(120)
def test_memory_is_used_where_the_disk_is_older_and_nothing_of_it_is_read(folder: Path) -> None:
    plan = Plan(strategy="fsdp")
    run_ranks(saved_on_disk, num_ranks=2, args=(folder, plan))
    for file in (folder / "checkpoints" / "step-00000002").iterdir():
        file.write_bytes(b"")
    assert run_ranks(stopped_at, num_ranks=2, args=(folder, plan, 5, (), True))[0]["first"] == 5


def of_another_width(rank: int, folder: Path) -> Any:
    return stopped(rank, folder, Plan(strategy="fsdp"), after=2, width=17)


@pytest.mark.timeout(120)
def test_a_snapshot_of_another_model_is_not_used_and_says_why(folder: Path) -> None:
    run_ranks(stopped_at, num_ranks=2, args=(folder, Plan(strategy="fsdp"), 3, ()))
    again = run_ranks(of_another_width, num_ranks=2, args=(folder,))[0]
    assert again["first"] == 0
    (line,) = (line for line in again["told"] if "not used" in line)
    assert line.startswith("the snapshot of step 3 in memory is not used: the checkpoint does not fit the model: ")
    say(line)


def without_room(rank: int, folder: Path) -> Any:
    full = generation.DataFile

    def refuse(path: Path, *, num_bytes: int) -> Any:
        if rank == 1:
            raise generation.NoRoom(path, num_bytes=num_bytes)
        return full(path, num_bytes=num_bytes)

    from shardwise.state.recovery import two_generations

    two_generations.DataFile = refuse  # type: ignore[assignment,misc]
    try:
        return stopped(rank, folder, Plan(strategy="fsdp"), after=6)
    finally:
        two_generations.DataFile = full  # type: ignore[misc]


@pytest.mark.timeout(120)
def test_without_room_training_continues_without_snapshots_and_one_line_says_how_much_it_takes(folder: Path) -> None:
    one, other = run_ranks(without_room, num_ranks=2, args=(folder,))
    assert len(one["losses"]) == len(other["losses"]) == 6
    (line,) = one["told"]
    assert line.startswith("/dev/shm has no room for snapshots: 2 ranks need ")
    assert line.endswith("; training continues without snapshots in memory")
    assert files_in(folder, ending=".state") == []
    say(line)


def refused(rank: int, progress: Any, every: int | None) -> None:
    model, optimizer = shardwise.prepare(model := torch.nn.Linear(3, 3), torch.optim.SGD(model.parameters()), "ddp")
    shardwise.protect(model, optimizer, progress, every=every)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("progress", "every", "line"),
    [
        ({"step": 3}, None, "progress: step is a int, without state_dict and load_state_dict"),
        (None, 0, "every = 0: must be at least 1"),
        (None, None, "protect without folder= needs a launcher that starts ranks again"),
    ],
)
def test_mistakes_get_one_line(progress: Any, every: int | None, line: str) -> None:
    with pytest.raises(RankFailed, match=line):
        run_ranks(refused, num_ranks=1, args=(progress, every))


# Ranks that are killed


def launched(folder: Path, strategy: str, *, kill: str = "") -> set[int]:
    """Run a job of our launcher, whose rank kills itself as `kill` says; return the restarts in which steps began."""
    program = str(HERE / "protected.py")
    with patch.dict(os.environ, {"KILL": kill}):
        code = launch([strategy, str(folder)], num_ranks=2, max_restarts=2, folder=folder, program=program)
    assert code == 0
    assert ranks_left() == []
    return {int(path.name.rpartition("-")[2]) for path in folder.glob("began-*")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "kill"),
    [("fsdp", "1 snapshot 5"), *whole(("ddp", "0 update 6"), ("zero1", "1 backward 7"), ("fsdp", "0 snapshot 3"))],
)
def test_a_rank_that_is_killed_costs_a_few_steps_and_no_bit(
    folder: Path, strategy: str, kill: str, forked_ranks: None
) -> None:
    for name, how in (("alone", ""), ("killed", kill)):
        (folder / name).mkdir()
        assert launched(folder / name, strategy, kill=how) == ({0, 1} if how else {0})
    one, other = (torch.load(folder / name / "end.pt") for name in ("alone", "killed"))
    step = int(kill.split()[-1])
    # A generation that was not whole yet is passed over.
    assert other["first"] in (newest(step), newest(step) - EVERY, newest(step - 1))
    assert one["losses"][other["first"] :] == other["losses"]
    assert equal(one["state"], other["state"])
    assert MEMORY not in os.environ
    assert list(Path("/dev/shm").glob(f"shardwise-{key_in(folder / 'killed')}")) == []


@pytest.mark.timeout(240)
@pytest.mark.whole
def test_a_rank_that_is_killed_under_torchrun_is_made_up_for_within_a_minute(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=3"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    torchrun += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"]
    environment = os.environ | {"KILL": "1 update 6", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(HERE / "protected.py"), "fsdp", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    next_step = min(path.stat().st_mtime for path in folder.glob("began-*-1"))
    seconds = next_step - (folder / "killed").stat().st_mtime
    print(f"the next step began after {seconds:.1f} s")
    assert seconds < 60
