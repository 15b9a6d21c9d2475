"""Muon for the matrices of a GPT, AdamW for the rest: `python benchmarks/muon_peers.py`.

States, on a CPU: bytes of optimizer state on rank 0 of 1, 2, 4 and 8, each a rehearsal of that rank without the others,
by strategy. Steps, on one GPU and one NCCL rank: GPT-124M, 4 × 1024 tokens, bf16; blocks of steps under our engine and
under torch's DDP alternate; with `--ranks 8`, steps of rank 0 of 8 in rehearsal. Writes
benchmarks/results/muon_peers.json. `--tiny`: a small model, on the CPU alone.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import RESULTS, circumstances, compared, job, show_compared, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import Plan
from shardwise.comm.job.absent import AbsentCollectives, absent_group, leave_out_reduce
from shardwise.models.tasks import Task, load_task

OUT = RESULTS / "muon_peers.json"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
NUM_RANKS = (1, 2, 4, 8)
PEER = "torch DDP"
WARM_UP = 6


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon takes the matrices of blocks; embeddings, head and vectors stay with AdamW."""
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.dim() == 2 and "blocks." in name]
    others = [parameter for name, parameter in named if parameter.dim() != 2 or "blocks." not in name]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-4)]


def stepping(task: Task, model: nn.Module, made: list[Any], *, batch: Any) -> Callable[[], Any]:
    def step() -> Any:
        loss = task.loss(model, batch)
        loss.backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def state_bytes(model: str, *, strategy: str, num_ranks: int) -> int:
    """Of rank 0, after a step."""
    with absent_group(num_ranks):
        task = load_task(model, seq=32, device="cpu")
        made = optimizers(task.model)
        plan = Plan(strategy=strategy, precision="bf16", capture="off")
        prepared, _ = shardwise.prepare(task.model, made, plan, collectives=AbsentCollectives())
        stepping(task, prepared, made, batch=task.make_batch(1))()
        states = [state for optimizer in made for state in optimizer.state.values()]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def measure_states(model: str) -> list[dict[str, Any]]:
    rows = []
    for strategy in STRATEGIES:
        held = {num_ranks: state_bytes(model, strategy=strategy, num_ranks=num_ranks) for num_ranks in NUM_RANKS}
        rows.append({"strategy": strategy, "state_bytes": held})
        shares = ", ".join(f"{num_ranks}: {size / held[1]:.4f}" for num_ranks, size in held.items())
        print(f"{strategy:6} {held[1] / 2**20:.1f} MiB on one rank; its share on rank 0 of {shares}", flush=True)
    return rows


def measure_steps(
    model: str, *, seq: int, samples: int, device: str, blocks: int, collectives: AbsentCollectives | None
) -> dict[str, Any]:
    def step_under(engine: str) -> Callable[[], Any]:
        torch.manual_seed(0)
        task = load_task(model, seq=seq, device=device)
        made, batch = optimizers(task.model), task.make_batch(samples)
        if engine == PEER:
            wrapped = DistributedDataParallel(task.model)
            if collectives:
                leave_out_reduce(wrapped)
            return torch.autocast(device, torch.bfloat16)(stepping(task, wrapped, made, batch=batch))
        plan = Plan(strategy=engine, precision="bf16", capture="off")
        prepared, _ = shardwise.prepare(task.model, made, plan, collectives=collectives)
        return stepping(task, prepared, made, batch=batch)

    engines = (*STRATEGIES, PEER)
    makes = {engine: partial(step_under, engine) for engine in engines}
    found = compared(makes, warm_up=WARM_UP, blocks=blocks, ratios=[(engine, PEER) for engine in engines])
    show_compared(model, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("states", "steps", "both"), default="both")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1, help="steps of rank 0 of so many, in rehearsal")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    model = "gpt-tiny" if asked.tiny else "gpt2-124m"
    found: dict[str, Any] = {} if asked.tiny else json.loads(OUT.read_text())
    if asked.action != "steps":
        found["states"] = measure_states(model)
    if asked.action != "states":
        size = {"seq": 16, "samples": 2} if asked.tiny else {"seq": 1024, "samples": 4}
        device = "cpu" if asked.tiny else "cuda"
        with job(device, num_ranks=asked.ranks) as collectives:
            key = "steps" if asked.ranks == 1 else f"steps_of_rank_0_of_{asked.ranks}"
            found[key] = measure_steps(model, **size, device=device, blocks=asked.blocks, collectives=collectives)
    write(None if asked.tiny else OUT, {**found, **circumstances()})


if __name__ == "__main__":
    main()
