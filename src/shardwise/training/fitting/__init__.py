"""The plan of a run that has to find one that fits.

auto_plan.py, automatic.py   `plan.strategy = "auto"`: rank 0 solves a plan
memory_probe.py              a rehearsal of a step of that plan; step_peak.py measures its peak
ran_out.py                   a start that runs out of memory: the next one takes a smaller plan
memory_advice.py             the planner's lines on an out-of-memory error
"""
