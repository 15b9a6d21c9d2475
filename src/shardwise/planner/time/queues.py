"""Four queues and their waits: the CPU issues, the device computes, and gathers and reduces share the wires.

A collective begins when the CPU has issued it, the device has computed what was issued before it, and its wire is free:
the links within a node, or the fabric between nodes. Of two that are under way at once each would take longer by what
the other takes of the wire, so one after the other ends as late. What is computed while something is on a wire is
slowed down: the collective's kernels take processors and memory bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.vocabulary.span import Span

COMPUTE, CALL, SEND, WAIT, MARK = range(5)
"""What is done: compute; let the CPU do something else; send; let the device wait for it; stand for other units."""


class Instruction(NamedTuple):
    """`what` is done, by name.

    COMPUTE   piece `number` of the work
    CALL      the CPU is busy for `launch` seconds
    SEND      on the wire for `seconds` (on the fabric if `number` is 1), once the CPU has spent `launch` to issue it
    WAIT      until what was sent by that name has arrived
    MARK      the end of a unit, which if `number` is 1 stands for `seconds` units like the one before it
    """

    what: int
    name: str
    number: int = 0
    launch: float = 0.0
    seconds: float = 0.0


Work = tuple[float, float, float]
"""Seconds of a piece of work: (launch, kernel, span), as compute.StreamSeconds has them."""

_ROUNDING = 1e-6

QueueTimes = tuple[float, float, float, float, float, float, float]
"""(cpu, compute, wire, fabric, exposed, sent, slowed) of the queues."""


@dataclass(slots=True, kw_only=True)
class Queues:
    """When each queue will have done what it has been given.

    exposed     seconds that the device stood still only because it waited for the wire
    sent        seconds that the wire was busy
    slowed      seconds that the device took longer because the wire was busy
    slowdown    by how much, of its own time, what is computed takes longer while the wire is busy
    is_host     the device is the CPU itself
    """

    slowdown: float
    is_host: bool = False
    cpu: float = 0.0
    compute: float = 0.0
    wire: float = 0.0
    fabric: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    slowed: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    marked: QueueTimes = (0.0,) * 7
    spans: list[Span] | None = None

    def run(self, instructions: Sequence[Instruction], works: Sequence[Work]) -> None:
        """Issue all instructions, in order."""
        # In local names: this loop is the planner's hottest.
        cpu, compute, wire, fabric, exposed, sent, slowed = self.now()
        slowdown, is_host, ends, spans = self.slowdown, self.is_host, self.ends, self.spans
        for what, name, number, launch, seconds in instructions:
            if what == COMPUTE:
                launch, kernel, span = works[number]
                if is_host:
                    # The CPU is the device: it issues and computes in turn.
                    compute, launch, kernel, span = cpu, 0.0, launch + kernel, 0.0
                start = compute if compute > cpu else cpu
                end = compute + kernel
                if cpu + span > end:
                    end = cpu + span
                busy = wire if wire > fabric else fabric
                if busy > start:
                    more = slowdown * (busy - start if busy - start < kernel else kernel)
                    end += more
                    slowed += more
                if spans is not None and kernel:
                    spans.append(Span("compute", name, max(start, end - kernel * (1 + slowdown)), end))
                compute = end
                cpu = end if is_host else cpu + launch
            elif what == SEND:
                cpu += launch
                start = compute if compute > cpu else cpu
                before = fabric if number else wire
                if before > start:
                    start = before
                ends[name] = end = start + seconds
                if number:
                    fabric = end
                else:
                    wire = end
                sent += seconds
                if spans is not None and seconds:
                    spans.append(Span(name.partition(" ")[0], name, start, end))
            elif what == WAIT:
                cpu += launch
                # In the first step, what a step before it would have sent is there.
                end = ends.pop(name, 0.0)
                if end > compute:
                    exposed += end - (compute if compute > cpu else cpu) if end > cpu else 0.0
                    compute = end
                    if is_host and end > cpu:
                        cpu = end
            elif what == CALL:
                cpu += launch
            else:
                self.set(cpu, compute, wire, fabric, exposed, sent, slowed)
                if number:
                    self.skip(self.marked, times=seconds - 1)
                self.marked = cpu, compute, wire, fabric, exposed, sent, slowed = self.now()
        self.set(cpu, compute, wire, fabric, exposed, sent, slowed)

    def restart(self, *, cpu: float) -> None:
        """Count from the end of what has been computed; what is on the wires stays."""
        end = self.compute
        self.ends = {name: arrival - end for name, arrival in self.ends.items()}
        self.set(cpu, 0.0, self.wire - end, self.fabric - end, 0.0, 0.0, 0.0)

    def now(self) -> QueueTimes:
        return self.cpu, self.compute, self.wire, self.fabric, self.exposed, self.sent, self.slowed

    def set(
        self, cpu: float, compute: float, wire: float, fabric: float, exposed: float, sent: float, slowed: float
    ) -> None:
        self.cpu, self.compute, self.wire, self.fabric = cpu, compute, wire, fabric
        self.exposed, self.sent, self.slowed = exposed, sent, slowed

    def skip(self, before: QueueTimes, *, times: float) -> None:
        """Repeat what happened since `before`, so many times: equal units advance every queue by the same seconds.

        Where one queue catches up with another on the way, whatever comes next still waits for the later of the two.
        Only what slows the device down does not come back by itself: it ends when the wires have been caught up with.
        """
        now = self.now()
        rates = [one - other for one, other in zip(now, before, strict=True)]
        compute, ahead, slowed = rates[1], max(rates[2], rates[3]), rates[6]
        slow_times = times
        if compute - ahead > _ROUNDING * compute:
            left = max(self.wire, self.fabric) - self.compute
            slow_times = min(times, max(0.0, left / (compute - ahead)))
        after = [one + times * rate for one, rate in zip(now, rates, strict=True)]
        after[1] -= (times - slow_times) * slowed
        after[6] -= (times - slow_times) * slowed
        self.set(*after)
        for name in self.ends:
            self.ends[name] += times * ahead
