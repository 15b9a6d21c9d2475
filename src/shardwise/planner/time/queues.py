"""Queues and their waits: the CPU issues, the device computes, and gathers and reduces share the wires.

A collective begins when the CPU has issued it, the device has computed what was issued before it, and its wire is free:
the links within a node, or the fabric between nodes. Two concurrent collectives would slow each other down, so running
them one after the other ends at the same time. Computation is slower while a wire is busy: the collective's kernels use
processors and memory bandwidth.

The link to host memory has two queues: `host`, of updates and of what backward needs, and `loads`, of what is needed
next. Both share its speed, so a load delays everything that is still in the other one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.base.vocabulary.span import Span

COMPUTE, CALL, SEND, WAIT, MARK, STREAM, LOAD, SYNC = range(8)
"""Kinds of instructions."""


class Instruction(NamedTuple):
    """An instruction of kind `what`.

    COMPUTE   run piece `number` of the work
    CALL      keep the CPU busy for `launch` seconds
    SEND      use the wire for `seconds` (the fabric if `number` is 1), after `launch` seconds of the CPU
    WAIT      wait until the collective of that name has arrived
    MARK      end a unit; if `number` is 1, it stands for `seconds` units like the one before it
    STREAM    use the link to host memory for `seconds` (of work `number`, if that is not 0), after `launch` seconds
    LOAD      the same for what is needed next, after the STREAM "update UNIT" of its unit, if there is one
    SYNC      the CPU waits for the device and for the link to host memory
    """

    what: int
    name: str
    number: int = 0
    launch: float = 0.0
    seconds: float = 0.0


class WorkSeconds(NamedTuple):
    """Seconds of operations that a CPU issues to a device, which runs them in order.

    launch   the CPU's time to issue them
    kernel   the device's time, if the CPU is far ahead
    span     from the issue of the first to the end of the last, on an idle device
    """

    launch: float
    kernel: float
    span: float


_ROUNDING = 1e-6

QueueTimes = tuple[float, float, float, float, float, float, float, float, float]
"""(cpu, compute, wire, fabric, host, loads, exposed, sent, slowed) of the queues."""


@dataclass(slots=True, kw_only=True)
class Queues:
    """The time at which each queue is finished.

    exposed     seconds in which the device was idle only because it waited for the wire
    sent        seconds in which the wire was busy
    slowed      additional seconds of the device because the wire was busy
    slowdown    relative increase of compute time while the wire is busy
    is_host     the CPU is the device
    lead        seconds by which the CPU can be ahead of a device that waits: then its queue is full
    streamed    the names of what was put into the queue `host`
    """

    slowdown: float
    is_host: bool = False
    lead: float = math.inf
    cpu: float = 0.0
    compute: float = 0.0
    wire: float = 0.0
    fabric: float = 0.0
    host: float = 0.0
    loads: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    slowed: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    streamed: set[str] = field(default_factory=set)
    marked: QueueTimes = (0.0,) * 9
    spans: list[Span] | None = None

    def run(self, instructions: Sequence[Instruction], works: Sequence[WorkSeconds]) -> None:
        # Local variables, because this is the planner's hottest loop.
        cpu, compute, wire, fabric, host, loads, exposed, sent, slowed = self.now()
        slowdown, is_host, lead, ends, spans = self.slowdown, self.is_host, self.lead, self.ends, self.spans
        for what, name, number, launch, seconds in instructions:
            if what == COMPUTE:
                launch, kernel, span = works[number]
                if is_host:
                    # The CPU issues and computes, one after the other.
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
                before = max(fabric if number else wire, ends.get(name, start))
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
                # In the first step there was no previous step to send it.
                end = ends.pop(name, 0.0)
                if end - lead > cpu:
                    cpu = end - lead
                if end > compute:
                    exposed += end - (compute if compute > cpu else cpu) if end > cpu else 0.0
                    compute = end
                    if is_host and end > cpu:
                        cpu = end
            elif what == CALL:
                cpu += launch
            elif what == STREAM:
                cpu += launch
                ends[name] = host = max(host, compute, cpu) + (works[number].kernel if number else seconds)
                self.streamed.add(name)
            elif what == LOAD:
                cpu += launch
                start = max(loads, compute, cpu, ends.pop(f"update {name.partition(' ')[2]}", 0.0))
                seconds = works[number].kernel if number else seconds
                if host > start:
                    # Both are half as fast meanwhile.
                    self._delay_streamed(seconds, after=start)
                    host, seconds = host + seconds, 2 * seconds
                ends[name] = loads = start + seconds
                if spans is not None and seconds:
                    spans.append(Span("gather", name, start, loads))
            elif what == SYNC:
                cpu = compute = max(cpu, compute, host)
            else:
                self.set(cpu, compute, wire, fabric, host, loads, exposed, sent, slowed)
                if number:
                    self.skip(self.marked, times=seconds - 1)
                self.marked = cpu, compute, wire, fabric, host, loads, exposed, sent, slowed = self.now()
        self.set(cpu, compute, wire, fabric, host, loads, exposed, sent, slowed)

    def _delay_streamed(self, seconds: float, *, after: float) -> None:
        """Let what is in the queue `host` at a time, and was not waited for, end later."""
        for name in self.streamed:
            if self.ends.get(name, after) > after:
                self.ends[name] += seconds

    def restart(self, *, cpu: float) -> None:
        """Count time from the end of the device's queue; keep what is on the wires."""
        end = self.compute
        self.ends = {name: arrival - end for name, arrival in self.ends.items()}
        self.streamed &= self.ends.keys()
        self.set(
            cpu, 0.0, self.wire - end, self.fabric - end, self.host - end, self.loads - end, 0.0, 0.0, 0.0
        )  # fmt: skip

    def now(self) -> QueueTimes:
        return (
            self.cpu, self.compute, self.wire, self.fabric, self.host, self.loads, self.exposed, self.sent, self.slowed
        )  # fmt: skip

    def set(self, *times: float) -> None:
        self.cpu, self.compute, self.wire, self.fabric, self.host, self.loads = times[:6]
        self.exposed, self.sent, self.slowed = times[6:]

    def skip(self, before: QueueTimes, *, times: float) -> None:
        """Repeat everything since `before` so many times: equal units advance every queue by the same seconds.

        If one queue catches up with another on the way, the next instruction still waits for the later of the two. Only
        the slowdown of the device needs care: it ends when the device has caught up with the wires.
        """
        now = self.now()
        rates = [one - other for one, other in zip(now, before, strict=True)]
        compute, ahead, slowed = rates[1], max(rates[2], rates[3]), rates[8]
        slow_times = times
        if compute - ahead > _ROUNDING * compute:
            left = max(self.wire, self.fabric) - self.compute
            slow_times = min(times, max(0.0, left / (compute - ahead)))
        after = [one + times * rate for one, rate in zip(now, rates, strict=True)]
        after[1] -= (times - slow_times) * slowed
        after[8] -= (times - slow_times) * slowed
        self.set(*after)
        for name in self.ends:
            self.ends[name] += times * ahead
