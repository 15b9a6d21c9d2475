"""The distributed sampler: each rank's part of one global order. No torch here.

There is one order of the samples for each (seed, epoch), whatever the number of ranks, and one
global position in it. With W ranks, rank r takes the positions p + r, p + r + W, p + r + 2W, … from
the current position p on. So when every rank has taken k samples, exactly the next k·W positions
are used up, and the position alone says what has been seen: a run that is stopped on 4 ranks goes
on with 3 and loses no sample and repeats none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.permutation import permute
from shardwise.errors import InvalidData

_BLOCK = 1024


class DistributedSampler:
    """The indices of one rank, from (epoch, position) on; for `DataLoader(sampler=…)`.

    endless=True, for training: epochs follow each other without a seam, so that all ranks always
    have equally many samples, and none is dropped or padded at the end of an epoch.
    endless=False, for evaluation: what is left of one epoch, each sample on exactly one rank;
    ranks differ by at most one sample.

    Iterating does not move the position, because a DataLoader reads ahead of the training. The
    loop says what it has used: `sampler.advance(samples of all ranks together)`.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        endless: bool = False,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks}")
        if num_samples < 0 or (endless and num_samples == 0):
            raise InvalidData(f"a dataset of {num_samples} samples cannot be trained on")
        self.num_samples = num_samples
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        self.shuffle = shuffle
        self.endless = endless
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        # Counted from the start of the epoch that is current now, so that in an endless order it runs past num_samples.
        # The loop moves the sampler on meanwhile.
        epoch, first = self.epoch, self.position + self.rank
        stop = None if self.endless else self.num_samples
        while stop is None or first < stop:
            end = first + _BLOCK * self.num_ranks
            positions = np.arange(first, end if stop is None else min(end, stop), self.num_ranks, dtype=np.int64)
            yield from self._samples(positions, epoch=epoch).tolist()
            first = end

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("an endless sampler has no length: count steps instead")
        return len(range(self.position + self.rank, self.num_samples, self.num_ranks))

    def _samples(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """`positions` from the start of `epoch` on."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        return permute(offsets, length=self.num_samples, seed=self.seed, epoch=epoch + epochs)

    def advance(self, num_samples: int) -> None:
        """Move on by what all ranks together have used; the end of an epoch is the start of the next."""
        if num_samples < 0 or (not self.endless and self.position + num_samples > self.num_samples):
            raise ValueError(f"advance by {num_samples} from position {self.position} of {self.num_samples} samples")
        self.position += num_samples
        if self.num_samples:
            epochs, self.position = divmod(self.position, self.num_samples)
            self.epoch += epochs

    def state_dict(self) -> dict[str, int | bool]:
        """Where the run is. The number of ranks is not part of it."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, of any number of ranks; the data and its order must be the same."""
        for name in ("num_samples", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise InvalidData(
                    f"the saved run read its data with {name} = {state[name]}, this one has "
                    f"{getattr(self, name)}: its position means nothing here"
                )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
