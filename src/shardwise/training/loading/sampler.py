"""The distributed sampler: each rank's share of one global order. No torch here.

Each (seed, epoch) has one order of the samples, whatever the number of ranks, and one global position in it. From the
position p on, rank r of W takes the positions p + r, p + r + W, p + r + 2W, … When every rank has taken k samples,
exactly the next k·W positions are used up, so the position alone says which samples were seen: a run that stopped on
4 ranks resumes on 3 without losing or repeating a sample.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.base.errors import InvalidData
from shardwise.comm.job.job_environment import start_of
from shardwise.training.loading.permutation import permute

_BLOCK = 1024


class DistributedSampler:
    """Yields the sample indices of one rank, for `DataLoader(sampler=…)`. Each epoch has another order.

        sampler = shardwise.DistributedSampler(dataset, drop_last=True)
        for epoch in range(num_epochs):
            for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
                ...

    num_samples      the dataset, or the number of its samples
    rank, num_ranks  this process's place in its job (default: from the process group, or from the launcher)
    drop_last        as in torch: drop the last samples of an epoch if they do not suffice for all ranks, so that all
                     ranks run the same number of steps. Without it every sample is on exactly one rank, and ranks
                     differ by at most one sample: for evaluation, or for a loop over `shardwise.join`
    endless          epochs follow each other without a gap: all ranks always have the same number of samples, and no
                     sample is dropped. The loop counts steps

    After the end of an epoch, the next iteration starts the next epoch; `set_epoch` chooses one, as in torch. A loop
    that leaves an epoch early starts the same epoch again unless it calls `set_epoch`.

    Iterating does not move `position`, because a DataLoader reads ahead of the training. To resume inside an epoch, the
    loop reports what it has used: `sampler.advance(number of samples of all ranks together)`.
    """

    def __init__(
        self,
        num_samples: int | Sized,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        endless: bool = False,
    ) -> None:
        own_rank, ranks_of_job = _place() if rank is None or num_ranks is None else (0, 1)
        rank = own_rank if rank is None else rank
        num_ranks = ranks_of_job if num_ranks is None else num_ranks
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks}")
        num_samples = num_samples if isinstance(num_samples, int) else len(num_samples)
        if num_samples < 0 or (endless and num_samples == 0):
            raise InvalidData(f"a dataset of {num_samples} samples cannot be trained on")
        if drop_last and not endless and num_samples < num_ranks:
            raise InvalidData(f"{num_samples} samples on {num_ranks} ranks: with drop_last no rank would get one")
        self.num_samples = num_samples
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.endless = endless
        self.epoch = 0
        self.position = 0
        # The (epoch, position) at which the last complete iteration started.
        self._read: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch at the next iteration. An epoch has the same order in every run."""
        if epoch < 0:
            raise ValueError(f"set_epoch({epoch}): epochs count from 0")
        self.epoch, self.position, self._read = epoch, 0, None

    def __iter__(self) -> Iterator[int]:
        if not self.endless and (self._read == (self.epoch, self.position) or self._stop == self.position):
            self.set_epoch(self.epoch + 1)
        # Kept here because the loop advances the sampler meanwhile. Positions count from the start of this epoch, so in
        # an endless order they run past num_samples.
        epoch, position = self.epoch, self.position
        first = position + self.rank
        stop = None if self.endless else self._stop
        while stop is None or first < stop:
            end = first + _BLOCK * self.num_ranks
            positions = np.arange(first, end if stop is None else min(end, stop), self.num_ranks, dtype=np.int64)
            yield from self._samples(positions, epoch=epoch).tolist()
            first = end
        self._read = (epoch, position)

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("an endless sampler has no length: count steps instead")
        return len(range(self.position + self.rank, self._stop, self.num_ranks))

    @property
    def _stop(self) -> int:
        """The end of the epoch; with drop_last, the end of the last round in which every rank gets a sample."""
        left_out = (self.num_samples - self.position) % self.num_ranks if self.drop_last else 0
        return self.num_samples - left_out

    def _samples(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Return the samples at `positions`, which count from the start of `epoch`."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        return permute(offsets, length=self.num_samples, seed=self.seed, epoch=epoch + epochs)

    def advance(self, num_samples: int) -> None:
        """Advance by the number of samples that all ranks together have used, into the next epoch if need be."""
        if num_samples < 0 or (not self.endless and self.position + num_samples > self.num_samples):
            raise ValueError(f"advance by {num_samples} from position {self.position} of {self.num_samples} samples")
        self.position += num_samples
        if self.num_samples:
            epochs, self.position = divmod(self.position, self.num_samples)
            self.epoch += epochs

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position in the data. It does not depend on the number of ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that any number of ranks saved; the data and its order must be the same."""
        for name in ("num_samples", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise InvalidData(
                    f"the saved run read its data with {name} = {state[name]}, this one has "
                    f"{getattr(self, name)}: its position means nothing here"
                )
        self.set_epoch(int(state["epoch"]))
        self.position = int(state["position"])


def _place() -> tuple[int, int]:
    """Return (rank, number of ranks) from the process group if there is one, else from the launcher."""
    # If nothing has imported torch yet, there is no process group.
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    start = start_of(os.environ)
    return start.rank, start.num_ranks
