"""Step 4 of 5, before a run: spec + plan + cluster → does it fit, memory by category, time of a step. No torch.

job.py             one plan of one model, in which a few units stand for many equal ones
engine_model.py    models of the engines: ours, torch's DDP, torch's fully_shard; their own costs
systems.py         other training systems: their settings, and what they add
ways.py            the traces that a plan needs
fold.py            shortens a model to these units, and moves the program's cursor through its step

memory/states.py, torch_states.py   bytes of parameters, gradients and optimizer state on a rank
memory/stream_peak.py               a stream of allocations and releases → its peak and its end
memory/executors/                   an operation of the program → what it allocates and frees, by engine
memory/events.py                    the rows of a step → memory events
memory/replay.py                    rows, one after another → peaks, for every batch at once
memory/allocations.py, allocator.py, reserved.py    single allocations → what the caching allocator reserves
memory/peak.py                      `estimate`: the memory of one plan and batch

time/compute.py         one operation of the model → seconds of the device, and of the CPU that issues it
time/pieces.py          the computation of a step, piece by piece, and its time; the rows of a step → its schedule
time/collective.py      rings and trees over the links of a cluster → seconds; the wait for the slowest node
time/time_executor.py   an operation of the program → instructions for the queues
time/queues.py          four queues and their waits
time/step_time.py       `estimate_time`: the time of one plan and batch
time/band.py            the error band of a time; a step over another fabric

traffic.py              the bytes that a rank sends in a step
search/candidates.py    plans for a cluster, each at its best batch
search/recommend.py     the recommended plan, and why
search/larger_clusters.py   more of the same devices, as they are rented
search/scale.py         the best plan on 8 to 16,384 devices
search/request.py       a request for a plan, and what follows from it
search/auto.py          `strategy = "auto"`: a request and a budget → one plan
search/uniform.py       plans with the same choice for every unit
search/solver.py, climb.py      the search: mixtures of two choices, then unit by unit
search/dial.py, dial_cost.py    the choices of all units as one value, and its cost by the replay
search/micro_batches.py         the micro-batches and the meshes that a search may try
search/frontier.py      the best speed for every budget
search/rent.py          kinds and counts of devices to rent, with plan, days and cost
search/training_cost.py days, GPU-hours and money of a training
search/chosen_text.py   the solver's choice in one sentence
"""

from shardwise.planner.memory.peak import MemoryEstimate, estimate

__all__ = ["MemoryEstimate", "estimate"]
