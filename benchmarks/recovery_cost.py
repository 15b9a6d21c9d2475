"""What snapshots in memory cost per step: phases with and without them in turn, in one job.

Started by `python benchmarks/recovery.py --cost CASE`; as a program it is one rank.

A phase with snapshots takes one at its first step, and ends when it is whole; the phase without has as many steps.
Their difference is what one snapshot costs: in time, and in CPU time of all ranks, which other work on the machine does
not change. At k steps between snapshots the cost per step is 1/k of it. k is what the training itself would choose.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    num_ranks: int
    strategy: str
    precision: str
    seq: int
    micro_batch: int
    num_steps: int


CASES = {
    "cpu": Case(model="gpt2-124m", num_ranks=4, strategy="ddp", precision="fp32", seq=64, micro_batch=1, num_steps=2),
    "h200": Case(
        model="llama-3.2-1b", num_ranks=1, strategy="fsdp", precision="bf16", seq=2048, micro_batch=2, num_steps=60
    ),
}


def measure(name: str, folder: Path, *, num_rounds: int) -> None:
    """Run the ranks and print the cost of each pair of phases."""
    from shardwise.training.launch.launch import launch

    case = CASES[name]
    code = launch(
        [name, str(folder), str(num_rounds)],
        num_ranks=case.num_ranks,
        max_restarts=0,
        folder=folder / "job",
        program=__file__,
    )
    if code:
        sys.exit(code)
    found = json.loads((folder / "cost.json").read_text())
    every = found["every"]
    for what, unit in (("seconds", "s"), ("cpu_seconds", "s of CPU")):
        on, off = ([phase[what] for phase in found[side]] for side in ("on", "off"))
        costs = [case.num_steps * (one - other) for one, other in zip(on, off, strict=True)]
        share = median(costs) / (every * median(off))
        print(f"{what} per step: on {median(on):.4f}, off {median(off):.4f}")
        print(f"  a snapshot costs {', '.join(f'{cost:+.3f}' for cost in costs)} {unit}: median {median(costs):+.3f}")
        print(f"  at k = {every}: {share:+.2%} of a step")
    print(f"by the parts that the training measures: {found['share']:.2%}")
    print(f"a snapshot is whole after {found['copy']:.2f} s")


def rank() -> None:
    import shardwise
    from shardwise.models.tasks import load_task

    case, folder, num_rounds = CASES[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    on_gpu = sys.argv[1] != "cpu"
    task = load_task(case.model, dataset="random", seq=case.seq)
    if on_gpu:
        task.model.cuda()
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=on_gpu)
    plan = shardwise.Plan(strategy=case.strategy, precision=case.precision)
    model, optimizer = shardwise.prepare(task.model, optimizer, plan, device="cuda:0" if on_gpu else "cpu")
    device = next(model.parameters()).device
    told: list[str] = []
    run = shardwise.protect(model, optimizer, folder=folder, tell=told.append)
    recovery, step = run._recovery, 0

    def train(num_steps: int, *, protected: bool) -> None:
        nonlocal step
        for _ in range(num_steps):
            batch = torch.utils._pytree.tree_map(lambda one: one.to(device), task.make_batch(case.micro_batch))
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if protected:
                run.completed(step)

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def phase(*, protected: bool) -> dict[str, float]:
        settle()
        # What lies between two phases is no step; the first step of this one takes a snapshot.
        recovery._cadence._last = None
        if protected:
            recovery._begun = -1
        begun, cpu = time.perf_counter(), time.process_time()
        train(case.num_steps, protected=protected)
        if protected:
            recovery._snapshots.join()
        settle()
        seconds = torch.tensor([time.process_time() - cpu], dtype=torch.float64, device=device)
        dist.all_reduce(seconds)
        elapsed = time.perf_counter() - begun
        return {"seconds": elapsed / case.num_steps, "cpu_seconds": float(seconds) / case.num_steps}

    # It measures steps, then its first snapshots, and chooses k.
    train(6, protected=True)
    recovery._snapshots.join()
    train(2, protected=True)
    every = recovery._flags.agreed["steps between snapshots"]
    # No other snapshot than the one at the beginning of a phase.
    recovery._asked = 10**6
    train(2, protected=True)
    found: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for number in range(num_rounds):
        # Each goes first equally often.
        for name in ("on", "off") if number % 2 else ("off", "on"):
            found[name].append(phase(protected=name == "on"))
    cadence = recovery._cadence
    if dist.get_rank() == 0:
        print("\n".join(told), flush=True)
        share = cadence.cost_seconds / (every * cadence.step_seconds)
        (folder / "cost.json").write_text(
            json.dumps(found | {"every": every, "share": share, "copy": cadence.copy_seconds})
        )
    run.close()


if __name__ == "__main__":
    rank()
