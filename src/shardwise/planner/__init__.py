"""Step 4 of 5, before a run: spec + plan + cluster → does it fit, where do the bytes go, how long is a step. No torch.

job.py             one plan of one model, its equal blocks folded into a few that stand for all (fold.py)
engine_model.py    what is known of each engine: ours, torch's DDP, torch's fully_shard
overhead.py        what an engine itself costs: the CPU's time, and copies
ways.py            how each unit runs: which traces a plan needs
trace_order.py     how the program's cursor moves through a step that nobody runs: in the order of the trace

Memory
memory/states.py, torch_states.py       what a rank holds of parameters, gradients and optimizer state
memory/stream_peak.py                   a stream of births and deaths → how far it rises, and where it ends
memory/executors/                       an operation of the program → what it allocates and frees, by engine
memory/events.py                        the rows of a step → what each allocates and frees
memory/replay.py                        rows, one after another → peaks, for every batch at once
memory/allocations.py, allocator.py, reserved.py    single allocations → what the caching allocator reserves
memory/peak.py                          `estimate`: all of it for one plan and batch

Time
time/compute.py         one operation of the model → seconds of the device, and of the CPU that issues it
time/pieces.py          what a model computes, piece by piece, and how long that takes
time/collective.py      rings and trees over the links of a cluster → seconds
time/time_executor.py   an operation of the program → instructions for the queues
time/instructions.py    the rows of a step → its schedule
time/queues.py          four queues and their waits
time/step_time.py       `estimate_time`: all of it for one plan and batch

traffic.py              the bytes that a rank sends in a step
search/candidates.py    plans for a cluster, each at its best batch
search/recommend.py     which to take, and why
search/scale.py         the same on 8 to 16,384 devices
search/auto.py          `strategy = "auto"`: a request and a budget → one plan; what is tried when nothing fits
search/solver.py, climb.py      the search: mixtures of two choices, then unit by unit
search/dial.py, dial_cost.py    the choices of all units as one value, and what it costs by the replay
search/micro_batches.py         which micro-batches may be tried
search/frontier.py      the best speed for every budget
search/training_cost.py days, GPU-hours and money of a whole training
search/chosen_text.py   what was chosen, in one sentence
"""

from shardwise.planner.memory.peak import MemoryEstimate, estimate

__all__ = ["MemoryEstimate", "estimate"]
