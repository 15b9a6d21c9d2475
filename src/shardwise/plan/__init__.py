"""Step 1 of 5: the user's decisions as one frozen plan. No torch here.

placement.py   replicated or sharded, for each state of a unit; the strategies as a table; the ranks as a grid
patterns.py    settings for some units only; the rule by which a model is cut into units
plan_keys.py   the keys of a plan, and what each means
plan.py        the plan itself: which keys go together, what follows for a unit, saved as TOML
limits.py      the settings that each engine can run
"""

from shardwise.plan.plan import Plan, as_plan

__all__ = ["Plan", "as_plan"]
