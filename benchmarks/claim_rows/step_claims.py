"""Claims about what happens in a step, checked on real ranks: `body(rank)` runs on each of two Gloo ranks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from claim_rows.claim import Check, Claim
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.program import Kind

RunRanks = Callable[..., list[Any]]
"""run_ranks(body, num_ranks=2): what `body(rank)` returned on each rank."""

NUM_BLOCKS = 6
_WIDTH = 8
_COLLECTIVES = (Kind.GATHER, Kind.REDUCE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Equal blocks, and an output at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _batch(rank: int) -> Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(rank))


def _prepared(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    return shardwise.prepare(model, torch.optim.AdamW(model.parameters()), shardwise.Plan(strategy=strategy))


def step_body(rank: int) -> dict[str, Any]:
    """All that ranks are asked, in one job."""
    return {"collectives": _collectives(rank), "averaged": _averaged(rank)}


def _collectives(rank: int) -> dict[str, dict[str, dict[str, int]]]:
    """Strategy → kind → how often it was issued for each unit or bucket, in one step."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        model, optimizer = _prepared(strategy)
        with shardwise.tape(model) as tape:
            for _ in range(2):
                # The first step learns the order of the units.
                tape.take()
                model(_batch(rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            entries = tape.take()
        counts = {kind: Counter(entry.subject for entry in entries if entry.kind is kind) for kind in _COLLECTIVES}
        found[strategy] = {kind.value: dict(count) for kind, count in counts.items()}
    return found


def _averaged(rank: int) -> dict[str, bool]:
    """Whether gradients are the ranks' mean when backward() returns."""
    return {
        "DistributedDataParallel": _is_mean(DistributedDataParallel(_seeded()), rank=rank),
        "`ddp`": _is_mean(_prepared("ddp")[0], rank=rank),
        "`no_sync()`": _is_mean(DistributedDataParallel(_seeded()), rank=rank, no_sync=True),
    }


def _seeded() -> Stack:
    torch.manual_seed(0)
    return Stack()


def _is_mean(model: nn.Module, *, rank: int, no_sync: bool = False) -> bool:
    if no_sync:
        with model.no_sync():
            model(_batch(rank)).square().mean().backward()
    else:
        model(_batch(rank)).square().mean().backward()
    alone = [_seeded() for _ in range(dist.get_world_size())]
    for other, copy in enumerate(alone):
        copy(_batch(other)).square().mean().backward()
    means = [torch.stack([p.grad for p in same]).mean(0) for same in zip(*(c.parameters() for c in alone), strict=True)]
    grads = [p.grad for p in model.parameters()]
    return all(torch.allclose(grad, mean, atol=1e-7) for grad, mean in zip(grads, means, strict=True))


def collectives(counts: Mapping[str, Any]) -> Claim:
    reduces = counts["ddp"]["reduce"]
    blocks = [f"blocks.{index}" for index in range(NUM_BLOCKS)]
    gathers = Counter(counts["fsdp"]["gather"][block] for block in blocks)
    scatters = [counts["fsdp"]["reduce"][block] for block in blocks]
    usual = gathers.most_common(1)[0][0]
    twice = [block for block in blocks if counts["fsdp"]["gather"][block] == 2]
    rows = [
        ("`ddp`, whole step", str(sum(counts["ddp"]["gather"].values())), f"{sum(reduces.values())} all-reduce"),
        (
            "`fsdp`, root",
            str(counts["fsdp"]["gather"]["(root)"]),
            f"{counts['fsdp']['reduce']['(root)']} reduce-scatter",
        ),
        *(
            (
                f"`fsdp`, {block}",
                str(counts["fsdp"]["gather"][block]),
                f"{counts['fsdp']['reduce'][block]} reduce-scatter",
            )
            for block in blocks
        ),
    ]
    per_unit = usual == 2 and all(count == 1 for count in scatters)
    return Claim(
        said="DDP does one all-reduce per step; FSDP does two gathers and one reduce-scatter.",
        number=f"DDP: {sum(reduces.values())} all-reduce; FSDP: {len(twice)} of {NUM_BLOCKS} blocks are gathered "
        f"twice, and {sum(scatters)} of {NUM_BLOCKS} are reduce-scattered",
        checks=[
            Check(
                when="it is counted per unit (FSDP) and per bucket of gradients (DDP)",
                holds=per_unit and all(count == 1 for count in reduces.values()),
            ),
            Check(
                when="it is counted for the whole model",
                holds=sum(reduces.values()) == 1 and sum(counts["fsdp"]["gather"].values()) == 2,
            ),
        ],
        head=("collectives of one step", "gathers", "reductions"),
        rows=rows,
        source=f"Counted on the tape of 2 Gloo ranks: a model of {NUM_BLOCKS} small blocks and a root.",
        comment="The root and the last block stay gathered between forward and backward. A model with more than 25 MiB "
        "of gradients has several buckets under DDP, so that they can be sent while backward still computes.",
    )


def inside_backward(ranks: Sequence[Mapping[str, bool]]) -> Claim:
    found = {name: all(rank[name] for rank in ranks) for name in ranks[0]}
    rows = [(name, "yes" if is_mean else "no") for name, is_mean in found.items()]
    return Claim(
        said="The all-reduce happens inside `backward()`.",
        number="; ".join(f"{name}: {'averaged' if is_mean else 'not averaged'}" for name, is_mean in found.items()),
        checks=[Check(when=f"the model runs under {name}", holds=is_mean) for name, is_mean in found.items()],
        head=("2 ranks, different batches", "gradients are the mean when `backward()` returns"),
        rows=rows,
        source="Measured on 2 Gloo ranks: each rank compares its gradients with the mean of both ranks' own.",
        comment="`no_sync()` (in Shardwise: `shardwise.accumulate`) is there to turn it off, for all passes of an "
        "accumulation but the last.",
    )


def same_batches() -> Claim:
    """What two ranks read in an epoch, with and without a distributed sampler."""
    samples, batch = 64, 8
    ways = {
        "ranks seed alike": [_order(samples, seed=0), _order(samples, seed=0)],
        "ranks seed differently": [_order(samples, seed=0), _order(samples, seed=1)],
        "each rank has its `DistributedSampler`": [
            list(shardwise.DistributedSampler(samples, rank=rank, num_ranks=2)) for rank in range(2)
        ],
    }
    rows, checks = [], []
    for name, orders in ways.items():
        batches = [[order[at : at + batch] for at in range(0, len(order), batch)] for order in orders]
        same = sum(one == other for one, other in zip(*batches, strict=True))
        twice = len(set(orders[0]) & set(orders[1]))
        rows.append((name, f"{same} of {len(batches[0])}", f"{twice} of {samples}"))
        if "Sampler" not in name:
            checks.append(Check(when=f"{name} and there is no distributed sampler", holds=same == len(batches[0])))
    return Claim(
        said="Without a distributed sampler, all ranks repeat the same batches.",
        number=f"{rows[0][1]} batches are the same with equal seeds, {rows[1][1]} with different ones",
        checks=checks,
        head=("2 ranks, one epoch of 64 samples", "equal batches", "samples read by both"),
        rows=rows,
        source="Measured: torch's `DataLoader(shuffle=True)` and `shardwise.DistributedSampler`, on the CPU.",
        comment="With different seeds the batches differ, but every rank still reads the whole dataset: an epoch "
        "takes as many steps as on one rank. `shardwise.prepare` warns when ranks get the same first batch.",
    )


def _order(samples: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=8, shuffle=True, generator=generator)
    return [int(value) for (values,) in loader for value in values]
