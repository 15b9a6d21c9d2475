"""Step 3 of 5: spec + plan → step program: one training step as a list of operations.

There is no torch, but in naive.py, which runs a model.
The planner replays it with byte counts and clocks, the engine issues it, the reports draw it.
"""

from shardwise.program.build import build, build_first_step, context_of
from shardwise.program.operations import Bucket, Kind, Operation, Row, StepProgram, Trigger, crossing_buckets

__all__ = [
    "Bucket",
    "Kind",
    "Operation",
    "Row",
    "StepProgram",
    "Trigger",
    "build",
    "build_first_step",
    "context_of",
    "crossing_buckets",
]
