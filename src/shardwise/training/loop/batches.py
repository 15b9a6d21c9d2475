"""The samples of each step: shared out to the ranks, and read pass by pass.

A step takes W × micro_batch × accumulate samples from the sampler's position on (W ranks), or, at the end of the last
epoch, those that are left. Rank r takes the positions r, r + W, r + 2W, … of them, in passes of at most micro_batch.
Every rank runs as many passes as rank 0, which has the most: a rank without a sample in a pass reads any sample and
counts it as 0, so that the others need not wait for it.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset

from shardwise.base.errors import InvalidData
from shardwise.training.launch.stop_signals import STOP_SIGNALS
from shardwise.training.loading.sampler import DistributedSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a step: the samples that count in each of its passes; `num_samples`: of all ranks together."""

    counts: tuple[int, ...]
    num_samples: int

    def weight(self, count: int, *, num_ranks: int) -> float:
        """Return the factor of a pass's mean loss, with which the average over ranks is the mean over the step.

        Σ_ranks Σ_passes (count · W / num_samples) · mean / W = Σ_samples loss / num_samples. In a full step it is
        1 / accumulate.
        """
        return count * num_ranks / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The rule for sharing out the samples of a step. Training ends after `num_samples`; None: it does not end."""

    rank: int
    num_ranks: int
    micro_batch: int
    accumulate: int
    num_samples: int | None

    @property
    def step_samples(self) -> int:
        """The samples of a full step on all ranks."""
        return self.num_ranks * self.micro_batch * self.accumulate

    def share(self, num_seen: int) -> Share | None:
        """Return this rank's part of the step that follows on `num_seen` samples; None after the last."""
        left = self.step_samples if self.num_samples is None else self.num_samples - num_seen
        if left <= 0:
            return None
        total = min(left, self.step_samples)
        most, own = (len(range(rank, total, self.num_ranks)) for rank in (0, self.rank))
        starts = range(0, most, self.micro_batch)
        counts = tuple(max(0, min(self.micro_batch, own - start)) for start in starts)
        return Share(counts=counts, num_samples=total)

    def num_steps_after(self, num_seen: int) -> int:
        """Return the number of steps until the last sample is seen."""
        assert self.num_samples is not None
        return -(-(self.num_samples - num_seen) // self.step_samples)


class Passes:
    """The sample indices of each pass, from the sampler's position on: a batch sampler for a DataLoader."""

    def __init__(self, sampler: DistributedSampler, *, sharing: Sharing) -> None:
        self._sampler = sampler
        self._sharing = sharing

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self._sampler)
        num_seen = samples_seen(self._sampler)
        while (share := self._sharing.share(num_seen)) is not None:
            for count in share.counts:
                # A pass in which nothing counts is a full one: BatchNorm refuses a single sample.
                yield list(islice(indices, count)) if count else [0] * self._sharing.micro_batch
            num_seen += share.num_samples


def samples_seen(sampler: DistributedSampler) -> int:
    """Return the samples that all ranks together have seen since the start of training."""
    return sampler.epoch * sampler.num_samples + sampler.position


def check_size(sampler: DistributedSampler, *, sharing: Sharing) -> None:
    """Raise an error if one step would go through the dataset more than once."""
    if sharing.step_samples > sampler.num_samples:
        raise InvalidData(
            f"the dataset has {sampler.num_samples} samples, fewer than one step takes: {sharing.num_ranks} ranks × "
            f"plan.micro_batch {sharing.micro_batch} × plan.accumulate {sharing.accumulate} = {sharing.step_samples}"
        )


def batches_of(
    dataset: Dataset[Any], sampler: DistributedSampler, *, sharing: Sharing, workers: int, device: torch.device
) -> Iterator[Any]:
    """Return an iterator of batches, one per pass. The loader has a generator of its own, so it changes no other."""
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=Passes(sampler, sharing=sharing),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(sampler.seed),
        worker_init_fn=_ignore_requests,
    )
    return iter(loader)


def _ignore_requests(worker: int) -> None:
    """Ignore requests to stop in a worker process: its rank needs samples until it has saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a batch to the device; from pinned memory the CPU does not wait for the copy."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def tokens_per_sample(batch: Any) -> int | None:
    """Return the tokens of a sample, if the batch's first tensor has whole numbers, [samples, tokens]."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() != 2 or first.is_floating_point():
        return None
    return first.shape[1]
