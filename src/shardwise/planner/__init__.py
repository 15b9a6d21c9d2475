"""Step 4 of 5, before a run: spec + plan + cluster → does it fit, and where do the bytes go. No torch here.

states.py      what a rank holds of parameters, gradients and optimizer state
tide.py        a stream of births and deaths → how far it rises, and where it ends
shorten.py     many equal blocks → a few that stand for all
moments.py     the step program → what each of its rows allocates and frees: our engine
native.py      the same for torch's own engines
job.py         one plan of one model, with all of these
replay.py      moments, one after another → peaks, for every batch at once
ledger.py, allocator.py, reserved.py    single allocations → what the caching allocator reserves
memory.py      `estimate`: all of it for one plan and batch
traffic.py     what a rank sends in a step
search.py      plans for a cluster, and which to take
"""

from shardwise.planner.memory import CATEGORIES, MemoryEstimate, estimate

__all__ = ["CATEGORIES", "MemoryEstimate", "estimate"]
