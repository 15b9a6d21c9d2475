"""Train a tiny GPT on the Python standard library's own source, in one process: an ordinary PyTorch loop.

This is what every strategy must reproduce on many ranks.
"""

import argparse
import time

import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from shardwise import DistributedSampler, load_task


def curve(losses: list[float], *, width: int = 60, height: int = 10) -> str:
    """The losses as text: one column for each of `width` equal parts of the run, its mean as the height."""
    size = max(1, len(losses) // width)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    rows = []
    for row in range(height, -1, -1):
        level = low + (high - low) * row / height
        dots = "".join("●" if round((mean - low) / (high - low or 1) * height) == row else " " for mean in means)
        rows.append(f"{level:6.2f} │{dots}".rstrip())
    return "\n".join([*rows, f"       └{'─' * len(means)} {len(losses)} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--dataset", default="stdlib")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    task = load_task(options.model, dataset=options.dataset)
    assert task.dataset is not None
    assert task.eval_dataset is not None
    assert task.evaluate is not None
    sampler = DistributedSampler(len(task.dataset), seed=options.seed, endless=True)  # type: ignore[arg-type]
    batches = iter(DataLoader(task.dataset, batch_size=options.micro_batch, sampler=sampler))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=options.lr)

    console = Console()
    num_params = sum(parameter.numel() for parameter in task.model.parameters())
    console.print(f"{options.model} ({num_params:,} parameters) on {options.dataset}, one process")
    losses: list[float] = []
    started = time.perf_counter()
    for _ in track(range(options.steps), description="Training", console=console, disable=not console.is_terminal):
        loss = task.loss(task.model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance(options.micro_batch)
        losses.append(loss.item())
    seconds = time.perf_counter() - started

    task.model.eval()
    held_out = DataLoader(task.eval_dataset, batch_size=32)
    sums = [task.evaluate(task.model, batch) for _, batch in zip(range(8), held_out, strict=False)]
    count = sum(part["count"] for part in sums)
    metrics = {name: float(sum(part[name] for part in sums) / count) for name in ("loss", "accuracy")}
    console.print(curve(losses), highlight=False)
    console.print(
        f"loss {losses[0]:.2f} → {losses[-1]:.2f}; on text it has not seen: loss {metrics['loss']:.2f}, "
        f"next byte right {metrics['accuracy']:.0%}; {options.steps * options.micro_batch / seconds:.0f} samples/s",
        highlight=False,
    )


if __name__ == "__main__":
    main()
