"""Whether all ranks have issued the same collectives in the same order, asked before each update, at no extra bytes.

The flags of used parameters are summed over all ranks at the end of a backward (used.py). They are whole numbers, and a
sum of them needs few bits; the other bits of the first flag carry

    Σ_r c_r · h_r  (mod 2^18)        h_r: what rank r has issued, as one number (comm/issued.py)

The coefficients c_r add up to 0, so that the sum is 0 where all h_r are equal; where they are not it is 0 in one case
of 2^18. The sum is the same on all ranks: all of them stop, and only then tell each other what they have issued. A rank
that has failed in the step, and has only taken part since, adds 1: then all hear of that before anyone updates.

On a GPU nobody waits for it: the flag is copied to the host during the computation, and looked at as soon as it is
there, at the latest before the update after the one that it was sent for.
"""

from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agreement import RanksDisagree, exchange
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import Issued, disagreement, first_difference, fold_all, names_of
from shardwise.engine.core.pass_state import PassState

# Of the first flag's 32 bits these count the ranks that used the parameter; torch's jobs are smaller.
_COUNT_BITS = 14
_MASK = 0xFFFFFFFF


def coefficient(rank: int, *, num_ranks: int) -> int:
    """Of all ranks they add up to 0; any two differ, and any that do not add up to 0 by chance."""
    if rank == num_ranks - 1:
        return -sum(coefficient(other, num_ranks=num_ranks) for other in range(num_ranks - 1))
    return crc32(b"%d" % rank) | 1


class SameOrder:
    """What one rank adds to the first flag, and what it finds there when all have."""

    def __init__(self, *, groups: MeshGroups, passes: PassState) -> None:
        self.flag: Tensor
        self._passes = passes
        # Rank → how it has failed in this step.
        self._failures: dict[int, str] = {}
        self._logs = {name: group.log for name, group in groups.by_name().items()}
        world = groups.reduce_world
        # A job of absent ranks adds nothing up.
        heard = world.size > 1 and dist.is_initialized() and dist.get_backend() != "fake"
        self._coefficient = coefficient(world.index, num_ranks=world.size) if heard else 0
        # How often ranks have compared, and what was issued before the last time.
        self._num_sent = 0
        self._sent: dict[str, Issued] = {}
        # Of a GPU's last flag: its copy on the host, when that is there, and what was issued before it.
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._copied_of: dict[str, Issued] = {}

    def resume_from(self, before: "SameOrder") -> None:
        """Count on where another plan of the same job has stopped, so that no number comes twice."""
        before.look(wait=True)
        self._num_sent = before._num_sent

    def send(self, used: int) -> None:
        """Write the first flag: whether its parameter was used (0 or 1), and what was issued up to here."""
        if not self._coefficient:
            for log in self._logs.values():
                log.restart()
            return
        value = (fold_all(self._logs.values()) >> _COUNT_BITS) * self._coefficient + bool(self._passes.failed)
        value = (value << _COUNT_BITS) + used & _MASK
        # As a signed number.
        self.flag.fill_(value - (value >> 31 << 32))
        self._sent = {name: log.take() for name, log in self._logs.items()}
        self._num_sent += 1

    def take_failures(self) -> dict[int, str]:
        """Once the flag is summed: rank → how it has failed in this step. Waits for a GPU."""
        if not self._coefficient:
            return {0: self._passes.failed} if self._passes.failed else {}
        self.look(wait=True)
        failures, self._failures = self._failures, {}
        return failures

    def users(self, summed: int) -> int:
        """How many ranks used the parameter of a flag."""
        return summed & (1 << _COUNT_BITS) - 1

    def read(self) -> None:
        """The flag is summed: refuse to continue if ranks differ, now or (a GPU's) as soon as it is on the host."""
        if not self._coefficient:
            return
        if self.flag.device.type == "cpu":
            # Not int(): that would count as a value which the step looks at (captured/reads.py).
            self._judge(self.flag.numpy().item(), issued=self._sent)
        elif not torch.cuda.is_current_stream_capturing():
            self.look(wait=True)
            if self._copy is None:
                self._copy = torch.empty(1, dtype=self.flag.dtype, pin_memory=True)
            self._copy.copy_(self.flag, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
            self._copied_of = self._sent

    def look(self, *, wait: bool = False) -> None:
        """Judge a GPU's flag if it is on the host."""
        if self._copied is None or torch.cuda.is_current_stream_capturing():
            # An event cannot be asked while a stream captures; the next ordinary step does it.
            return
        if not (wait or self._copied.query()):  # type: ignore[no-untyped-call]
            return
        self._copied.synchronize()
        self._copied = None
        assert self._copy is not None
        self._judge(int(self._copy), issued=self._copied_of)

    def history(self) -> dict[int, dict[str, list[str]]]:
        """What was issued since the last comparison but one, by the number of the comparison that it is part of."""
        now = {name: log.issued for name, log in self._logs.items()}
        return {
            number: {name: names_of(issued) for name, issued in logs.items()}
            for number, logs in ((self._num_sent - 1, self._sent), (self._num_sent, now))
        }

    def numbered(self) -> dict[str, list[tuple[int, str]]]:
        """The same by group, each with its number among all that was compared in the group: for a record (comm/)."""
        found = {}
        for name, log in self._logs.items():
            now, before = log.issued, self._sent.get(name, [])
            first = log.num_compared - len(before) + 1
            found[name] = list(enumerate((*names_of(before), *names_of(now)), start=first))
        return found

    def _judge(self, summed: int, *, issued: dict[str, Issued]) -> None:
        if (summed & _MASK) >> _COUNT_BITS == 0:
            return
        mine = {name: names_of(collectives) for name, collectives in issued.items()}
        everyone = exchange((mine, self._passes.failed))
        self._failures = {rank: failed for rank, (_, failed) in enumerate(everyone) if failed}
        difference = first_difference({rank: theirs for rank, (theirs, _) in enumerate(everyone)}, ended=True)
        if difference or not self._failures:
            raise RanksDisagree(disagreement(difference))
