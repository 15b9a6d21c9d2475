"""Step 4 of 5, before a run: spec + plan + cluster → does it fit, where do the bytes go, how long is a step. No torch.

job.py         one plan of one model, its equal blocks folded into a few that stand for all (fold.py)
traffic.py     what a rank sends in a step

memory/states.py           what a rank holds of parameters, gradients and optimizer state
memory/stream_peak.py      a stream of births and deaths → how far it rises, and where it ends
memory/engine_events.py    the step program → what each of its rows allocates and frees: our engine
memory/torch_events.py     the same for torch's own engines
memory/replay.py           rows, one after another → peaks, for every batch at once
memory/allocations.py, allocator.py, reserved.py    single allocations → what the caching allocator reserves
memory/peak.py             `estimate`: all of it for one plan and batch

time/compute.py        one operation → seconds of the device, and of the CPU that issues it
time/pieces.py         what a model computes, piece by piece, and how long that takes
time/collective.py     rings and trees over the links of a cluster → seconds
time/overhead.py       what an engine itself costs
time/instructions.py   the step program → instructions for the queues
time/queues.py         four queues and their waits
time/step_time.py      `estimate_time`: all of it for one plan and batch

search/candidates.py   plans for a cluster, each at its best batch
search/recommend.py    which one to take, and why
search/scale.py        the same on 8 to 16,384 devices
"""

from shardwise.planner.memory.peak import MemoryEstimate, estimate

__all__ = ["MemoryEstimate", "estimate"]
