"""Evaluation: sums over the evaluation samples, on all ranks together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.training.loading.sampler import DistributedSampler
from shardwise.training.loop.batches import Sharing, batches_of, to_device


def evaluate(
    model: nn.Module,
    sums_of: Callable[[nn.Module, Any], Mapping[str, Tensor]],
    dataset: Dataset[Any],
    *,
    sharing: Sharing,
    device: torch.device,
    workers: int = 0,
    num_samples: int | None = None,
) -> dict[str, float]:
    """Return Σ sum / Σ count over the dataset, or its first `num_samples`, each sample on exactly one rank. Collective.

    A forward with sharded parameters needs all ranks: a rank that has one sample less runs a batch that is not added.
    """
    size = min(len(cast(Any, dataset)), num_samples or 2**62)
    # One step of all samples.
    sharing = replace(sharing, accumulate=max(1, size), num_samples=size)
    share = sharing.share(0)
    if share is None:
        raise InvalidData("the evaluation dataset is empty")
    sampler = DistributedSampler(size, rank=sharing.rank, num_ranks=sharing.num_ranks, shuffle=False)
    batches = batches_of(dataset, sampler, sharing=sharing, workers=workers, device=device)
    totals: dict[str, Tensor] = {}
    with _evaluating(model):
        for count, batch in zip(share.counts, batches, strict=True):
            for name, value in sums_of(model, to_device(batch, device)).items():
                total = totals.setdefault(name, torch.zeros((), dtype=torch.float64, device=device))
                if count:
                    total += value
    return _means(totals)


def _means(totals: Mapping[str, Tensor]) -> dict[str, float]:
    if "count" not in totals:
        raise InvalidModel('Task.evaluate must return sums by name, and under "count" how many were summed')
    names = sorted(totals)
    values = torch.stack([totals[name] for name in names])
    dist.all_reduce(values)
    sums = dict(zip(names, values.tolist(), strict=True))
    count = sums.pop("count")
    return {name: total / count if count else float("nan") for name, total in sums.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of each module: some may be frozen in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before.items():
            module.training = mode
