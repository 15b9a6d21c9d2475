"""Step 4 of 5, before a run: spec + plan + cluster → does it fit, where do the bytes go, how long is a step. No torch.

job.py         one plan of one model, its equal blocks shortened to a few that stand for all (shorten.py)

Memory
states.py      what a rank holds of parameters, gradients and optimizer state
tide.py        a stream of births and deaths → how far it rises, and where it ends
moments.py     the step program → what each of its rows allocates and frees: our engine
native.py      the same for torch's own engines
replay.py      moments, one after another → peaks, for every batch at once
ledger.py, allocator.py, reserved.py    single allocations → what the caching allocator reserves
memory.py      `estimate`: all of it for one plan and batch

Time
compute.py     one operation → seconds of the device, and of the CPU that issues it
pieces.py      what a model computes, piece by piece, and how long that takes
collective.py  rings and trees over the links of a cluster → seconds
overhead.py    what an engine itself costs
schedule.py    the step program → instructions for the queues
queues.py      four queues and their waits
time.py        `estimate_time`: all of it for one plan and batch

traffic.py     what a rank sends in a step
search.py      plans for a cluster, each at its best batch
rank.py        which to take, and why
scale.py       the same on 8 to 16,384 devices
"""

from shardwise.planner.memory.peak import CATEGORIES, MemoryEstimate, estimate

__all__ = ["CATEGORIES", "MemoryEstimate", "estimate"]
