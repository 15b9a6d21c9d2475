"""Compares the order of collectives across ranks before each update, without extra communication.

The flags of used parameters are summed over all ranks at the end of a backward (used.py). They are integers, and their
sum needs few bits; the other bits of the first flag carry

    Σ_r c_r · h_r  (mod 2^b)         h_r: a hash of the collectives that rank r has issued (comm/groups/issued.py), and
                                     of its optimizers' options
                                     b: the bits that the count of ranks leaves, 18 or fewer

The coefficients c_r add up to 0, so the sum is 0 if all h_r are equal; otherwise it is 0 with probability 2^-b, or
twice that. The sum is the same on all ranks: if it is not 0, all of them stop and exchange lists of both.

On a GPU no rank waits for it: the flag is copied to the host during the computation, and checked as soon as it has
arrived, at the latest before the next update.

With different learning rates, slices would be trained differently. Rates that are tensors on a GPU are hashed there, so
that no rank waits for them. Only an optimizer's own options (its `defaults`) are compared: it may keep other values per
group, as a count of the steps in which this rank had parameters.

Without it a rank that issues other collectives waits for ever, or sums what does not belong together, with no error.
Or the model is a mixture of trainings: replicas stay equal, since each slice has one owner. Since 65e371d4 (ranks that
stop), before each update since f06b42dc, options since 0de77b37.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.groups.agreement import RanksDisagree, exchange
from shardwise.comm.groups.groups import MeshGroups
from shardwise.comm.groups.issued import Issued, disagreement, first_difference, fold_all, names_of

# 2^32 / golden ratio, as in comm/groups/issued.py.
_SPREAD = 0x9E3779B1
_MASK = 0xFFFFFFFF
# Ranks on different machines may compute a schedule with different last bits.
_TOLERANCE = 1e-6
_NUMBERS = frozenset({bool, int, float})

Options = dict[int, list[dict[str, Any]]]
"""Number of an optimizer → option → value, for each param group."""


class OptimizerOptions:
    """The options of a model's optimizers; `numbers`: each optimizer's number, the same on all ranks."""

    def __init__(self, numbers: Mapping[Optimizer, int]) -> None:
        self._numbers = numbers

    def fold(self) -> int:
        """Return a number for all options that are numbers on the host."""
        # fp32: without the last digits.
        found = array("f")
        for optimizer in self._numbers:
            options = tuple(optimizer.defaults)
            for group in optimizer.param_groups:
                for value in map(group.get, options):
                    if type(value) in _NUMBERS:
                        found.append(value)  # type: ignore[arg-type]
                    elif value is not None:
                        found.extend(_numbers_in(value))
        return crc32(found)

    def fold_rates(self, device: torch.device) -> Tensor | None:
        """Return a number for the learning rates on this GPU, as a tensor; None if there are none."""
        if device.type == "cpu":
            return None
        rates = [rate for group in self._groups() if isinstance(rate := group.get("lr"), Tensor)]
        rates = [rate.detach().reshape(()).float() for rate in rates if rate.device == device]
        if not rates:
            return None
        bits = torch.stack(rates).view(torch.int32).long()
        odd = torch.arange(1, 2 * len(rates), 2, device=bits.device)
        return (bits * odd).sum() * _SPREAD & _MASK

    def values(self) -> Options:
        """Return all options that are numbers or tensors of one. Waits for a GPU."""
        return {
            number: [
                {option: _shown(group[option]) for option in optimizer.defaults if option in group}
                for group in optimizer.param_groups
            ]
            for optimizer, number in self._numbers.items()
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._numbers for group in optimizer.param_groups]


def first_different_option(everyone: Sequence[Options]) -> str:
    """Describe the first option in which ranks differ, or return "". An optimizer that one rank has dropped is none."""
    none: dict[str, Any] = {}
    for rank, theirs in enumerate(everyone):
        for number in sorted(everyone[0].keys() & theirs.keys()):
            for index, (one, other) in enumerate(zip_longest(everyone[0][number], theirs[number], fillvalue=none)):
                for option in {**one, **other}:
                    ours, its = one.get(option), other.get(option)
                    if not _alike(ours, its):
                        whose = f" of optimizer {number + 1}" if len(everyone[0]) > 1 else ""
                        return f"param_groups[{index}]['{option}']{whose} is {ours} on rank 0, {its} on rank {rank}"
    return ""


def different_options(difference: str) -> str:
    """Return the error message for the first difference."""
    return (
        f"ranks train with different options: {difference}; each would update its part of the model by its own. Give "
        "all ranks the same value: a scheduler that follows a loss (ReduceLROnPlateau) needs the mean over all ranks, "
        "for example torch.distributed.all_reduce(loss) before scheduler.step(loss)"
    )


def _numbers_in(value: Any) -> Sequence[float]:
    """Return the numbers of an option on the host: of a pair of betas, or of a tensor on the CPU."""
    if isinstance(value, Tensor):
        return [float(value.detach())] if value.device.type == "cpu" and value.numel() == 1 else []
    if isinstance(value, tuple):
        return [number for part in value for number in _numbers_in(part)]
    return [value] if isinstance(value, int | float) else []


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    return value if isinstance(value, int | float | str) else None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (one != one and other != other)
    return bool(one == other)


# Fewer ranks than 2^14 are counted with as many bits.
_LEAST_COUNT_BITS = 14


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
