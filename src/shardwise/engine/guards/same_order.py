"""Compares the order of collectives across ranks before each update, without extra communication.

The flags of used parameters are summed over all ranks at the end of a backward (used.py). They are integers, and their
sum needs few bits; the other bits of the first flag carry

    Σ_r c_r · h_r  (mod 2^b)         h_r: a hash of the collectives that rank r has issued (comm/issued.py), and of
                                     its optimizers' options (same_options.py)
                                     b: the bits that the count of ranks leaves, 18 or fewer

The coefficients c_r add up to 0, so the sum is 0 if all h_r are equal; otherwise it is 0 with probability 2^-b, or
twice that. The sum is the same on all ranks: if it is not 0, all of them stop and exchange lists of both.

On a GPU no rank waits for it: the flag is copied to the host during the computation, and checked as soon as it has
arrived, at the latest before the next update.

Without it a rank that issues other collectives waits for ever, or sums what does not belong together, with no error.
Since 65e371d4 (ranks that stop), before each update since f06b42dc.
"""

from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agreement import RanksDisagree, exchange
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import Issued, disagreement, first_difference, fold_all, names_of
from shardwise.engine.guards.same_options import OptimizerOptions, different_options, first_different_option

# Fewer ranks than 2^14 are counted with as many bits.
_LEAST_COUNT_BITS = 14
_MASK = 0xFFFFFFFF


def count_bits(num_ranks: int) -> int:
    """Return how many bits of the first flag (of 32) count the ranks that used the parameter: all of them may have."""
    return max(_LEAST_COUNT_BITS, num_ranks.bit_length())


def coefficient(rank: int, *, num_ranks: int) -> int:
    """Return a rank's coefficient x_r − x_{r+1}, where x are pseudo-random numbers and x_{num_ranks} is x_0.

    All of them add up to 0. Those of some ranks add up to the x at the ends of each run of neighbours, which is not 0.
    x is odd for every second rank, so that differences are odd and products lose no bit.
    """
    after = (rank + 1) % num_ranks
    return _drawn(rank) - _drawn(after)


def _drawn(rank: int) -> int:
    return crc32(b"%d" % rank) & ~1 | rank & 1


class SameOrder:
    """Writes this rank's part of the first flag, and checks the sum of all ranks."""

    def __init__(self, *, groups: MeshGroups, options: OptimizerOptions) -> None:
        self.flag: Tensor
        self._options = options
        self._logs = {name: group.log for name, group in groups.by_name().items()}
        world = groups.world
        # With absent ranks (a rehearsal) nothing is summed.
        compares = world.size > 1 and dist.is_initialized() and dist.get_backend() != "fake"
        self._coefficient = coefficient(world.index, num_ranks=world.size) if compares else 0
        self._count_bits = count_bits(world.size)
        # The number of comparisons, and the collectives that the last one covers.
        self._num_sent = 0
        self._sent: dict[str, Issued] = {}
        # A GPU's last flag: its copy on the host, the event of that copy, and the collectives that it covers.
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._copied_of: dict[str, Issued] = {}

    def resume_from(self, before: "SameOrder") -> None:
        """Continue the numbers of the previous plan, so that none is used twice."""
        before.check(wait=True)
        self._num_sent = before._num_sent

    def send(self, used: int) -> None:
        """Write the first flag: whether its parameter was used (0 or 1), and the hash of issued collectives."""
        if not self._coefficient:
            for log in self._logs.values():
                log.restart()
            return
        issued = fold_all(self._logs.values())
        # Where nothing is issued, nothing is summed either (a benchmark without communication).
        folded = issued ^ self._options.fold() if issued else 0
        shift = self._count_bits
        value = ((folded >> shift) * self._coefficient << shift) + used & _MASK
        # As a signed number.
        self.flag.fill_(value - (value >> 31 << 32))
        rates = self._options.fold_rates(self.flag.device)
        if issued and rates is not None:
            self.flag.add_(((rates >> shift) * self._coefficient << shift).int())
        self._sent = {name: log.take() for name, log in self._logs.items()}
        self._num_sent += 1

    def users(self, summed: int) -> int:
        """Return how many ranks used the parameter of a flag."""
        return summed & (1 << self._count_bits) - 1

    def read(self) -> None:
        """Check the summed flag: now on a CPU, as soon as it is on the host on a GPU."""
        if not self._coefficient:
            return
        if self.flag.device.type == "cpu":
            self._check_sum(int(self.flag), issued=self._sent)
        else:
            self.check(wait=True)
            if self._copy is None:
                self._copy = torch.empty(1, dtype=self.flag.dtype, pin_memory=True)
            self._copy.copy_(self.flag, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
            self._copied_of = self._sent

    def check(self, *, wait: bool = False) -> None:
        """Check a GPU's flag if it has arrived on the host."""
        if self._copied is None:
            return
        if not (wait or self._copied.query()):  # type: ignore[no-untyped-call]
            return
        self._copied.synchronize()
        self._copied = None
        assert self._copy is not None
        self._check_sum(int(self._copy), issued=self._copied_of)

    def history(self) -> dict[int, dict[str, list[str]]]:
        """Return the collectives of the last comparison and those since, by number of the comparison."""
        now = {name: log.issued for name, log in self._logs.items()}
        return {
            number: {name: names_of(issued) for name, issued in logs.items()}
            for number, logs in ((self._num_sent - 1, self._sent), (self._num_sent, now))
        }

    def numbered(self) -> dict[str, list[tuple[int, str]]]:
        """Return the same by group, each collective with its number in the group: for a record (comm/)."""
        found = {}
        for name, log in self._logs.items():
            now, before = log.issued, self._sent.get(name, [])
            first = log.num_compared - len(before) + 1
            found[name] = list(enumerate((*names_of(before), *names_of(now)), start=first))
        return found

    def _check_sum(self, summed: int, *, issued: dict[str, Issued]) -> None:
        if (summed & _MASK) >> self._count_bits == 0:
            return
        mine = {name: names_of(collectives) for name, collectives in issued.items()}
        everyone = exchange((mine, self._options.values()))
        difference = first_difference({rank: theirs for rank, (theirs, _) in enumerate(everyone)}, ended=True)
        options = [options for _, options in everyone]
        different = first_different_option(options)
        if different and not difference:
            raise RanksDisagree(different_options(different))
        # Options that differ by their last digits, or of an optimizer that one rank has dropped, explain the sum.
        if difference or all(others == options[0] for others in options):
            raise RanksDisagree(disagreement(difference))
