"""What snapshots in memory cost per step: GPT-124M on 4 CPU ranks, phases with and without them in turn.

Started by `python benchmarks/recovery.py --cost`; as a program it is one rank.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

NUM_RANKS, SEQ, MICRO_BATCH = 4, 64, 1


def measure(folder: Path, *, num_rounds: int) -> None:
    """Run the ranks and print the ratio of each pair of phases."""
    from shardwise.launch.launch import launch

    code = launch(
        [str(folder), str(num_rounds)], num_ranks=NUM_RANKS, max_restarts=0, folder=folder / "job", program=__file__
    )
    if code:
        sys.exit(code)
    found = json.loads((folder / "cost.json").read_text())
    ratios = [on / off - 1 for on, off in zip(found["on"], found["off"], strict=True)]
    print(f"seconds per step: on {median(found['on']):.3f}, off {median(found['off']):.3f}; k = {found['every']}")
    print(f"on / off − 1, of each pair: {', '.join(f'{ratio:+.2%}' for ratio in ratios)}")
    print(f"median {median(ratios):+.2%}; by the parts that are measured: {found['share']:.2%} of the time")


def rank() -> None:
    import shardwise
    from shardwise.tasks import load_task

    folder, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    task = load_task("gpt2-124m", dataset="random", seq=SEQ)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4)
    model, optimizer = shardwise.prepare(task.model, optimizer, "ddp", device="cpu")
    told: list[str] = []
    run = shardwise.protect(model, optimizer, folder=folder, tell=told.append)
    recovery, step = run._recovery, 0

    def phase(num_steps: int, *, protected: bool) -> float:
        nonlocal step
        torch.distributed.barrier()
        # What lies between two phases with snapshots is no step.
        recovery._cadence._last = None
        begun = time.perf_counter()
        for _ in range(num_steps):
            task.loss(model, task.make_batch(MICRO_BATCH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if protected:
                run.completed(step)
        if protected:
            recovery._snapshots.join()
        torch.distributed.barrier()
        return (time.perf_counter() - begun) / num_steps

    phase(8, protected=True)
    every = recovery._flags.agreed["steps between snapshots"]
    num_steps = every * -(-4 // every)
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(num_rounds):
        # Each goes first equally often.
        for name in ("on", "off") if number % 2 else ("off", "on"):
            found[name].append(phase(num_steps, protected=name == "on"))
    share = recovery._cadence.cost_seconds / (every * recovery._cadence.step_seconds)
    if torch.distributed.get_rank() == 0:
        print("\n".join(told), flush=True)
        (folder / "cost.json").write_text(json.dumps(found | {"every": every, "share": share}))
    run.close()


if __name__ == "__main__":
    rank()
