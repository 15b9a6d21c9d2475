"""A small training on two ranks, of which rank 1 goes wrong before its fourth step: what test_watch.py starts.

python stalling.py FAULT STRATEGY WATCH_SECONDS
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from wrong import WIDTH, Blocks, WrongCollectives

import shardwise
from shardwise import Plan
from shardwise.comm.groups.collectives import BackendCollectives


def run_rank(rank: int, environment: dict[str, str], output: Path, arguments: tuple[str, str, str]) -> None:
    """One rank in a process of its own, as a bare loop would start it."""
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        main(*arguments)
    finally:
        # As a script's process ends; those of multiprocessing leave this out.
        atexit._run_exitfuncs()


def go_wrong(fault: str, model: nn.Module, collectives: WrongCollectives | None, x: Tensor) -> None:
    print(f"wrong at {time.time()}", flush=True)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "data":
        time.sleep(1000)
    elif fault == "alone":
        with torch.no_grad():
            while True:
                model(x)
                time.sleep(0.05)
    elif fault == "state_dict":
        model.state_dict()
    elif fault == "forward":
        with torch.no_grad():
            model(x)
    elif fault == "evaluation":
        model.blocks[2].register_forward_pre_hook(lambda *_: time.sleep(1000))
    elif collectives is not None:
        collectives.armed = True


def main(fault: str, strategy: str, watch_seconds: str) -> None:
    torch.set_num_threads(1)
    x = torch.randn(2, WIDTH)
    # The first step of a process is slow on a busy machine: one that is not watched goes first.
    first = shardwise.prepare(Blocks(), None, Plan(strategy=strategy), watch_seconds=0.0)[0]
    first(x).square().mean().backward()
    del first
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = WrongCollectives(BackendCollectives(), fault=fault) if fault in ("skip reduce", "extra reduce") else None
    shardwise.prepare(model, optimizer, Plan(strategy=strategy), collectives=wrong, watch_seconds=float(watch_seconds))
    for step in range(1, 7):
        if step == 4 and fault == "pause":
            time.sleep(2 * float(watch_seconds))
        elif step == 4 and os.environ["RANK"] == os.environ.get("WRONG_RANK", "1"):
            go_wrong(fault.partition(",")[0], model, wrong, x)
        if step == 4 and fault.endswith("barrier"):
            torch.distributed.barrier()
        if step == 4 and fault.endswith("end"):
            return
        if step == 4 and fault == "evaluation":
            with torch.no_grad():
                model(x)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} is done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
