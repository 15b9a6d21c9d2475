"""Step 1 of 5: what the user decides, as one frozen plan. No torch here.

placement.py   what is replicated and what is sharded; the strategies as a table
plan.py        the plan itself, saved as TOML
limits.py      what each engine cannot do
"""

from shardwise.plan.plan import Plan, as_plan

__all__ = ["Plan", "as_plan"]
