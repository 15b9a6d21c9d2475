"""An ordinary PyTorch loop on as many ranks as there are: `prepare` makes the model and the optimizer run a plan.

python examples/train_minimal.py                                        one rank
torchrun --nproc-per-node 2 examples/train_minimal.py --strategy ddp    two
"""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardwise
from shardwise import DistributedSampler, Plan, load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    torch.manual_seed(0)
    task = load_task("gpt-tiny", dataset="stdlib", seq=64, device="meta")  # prepare fills it, slice by slice
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-3)
    plan = Plan(strategy=options.strategy, micro_batch=8)
    model, optimizer = shardwise.prepare(task.model, optimizer, plan)

    device = next(model.parameters()).device
    assert task.dataset is not None
    sampler = DistributedSampler(task.dataset, endless=True)  # type: ignore[arg-type]
    batches = DataLoader(task.dataset, batch_size=plan.micro_batch, sampler=sampler)
    for step, (tokens, targets) in enumerate(islice(batches, options.steps), start=1):
        loss = task.loss(model, (tokens.to(device), targets.to(device)))
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f} (rank 0's)", flush=True)


if __name__ == "__main__":
    main()
