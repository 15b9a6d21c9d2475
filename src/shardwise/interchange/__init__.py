"""The same decision in other tools' words: plans written as their files, and their files read as plans.

exported.py        files for a target, and what it cannot express
to_….py            a plan → files that the target runs as they are
export.py          the targets by name
foreign_setup.py   what a file of another tool says, in our words
from_….py          that tool's keys → a plan
recognise.py       whose file is it?
mistakes.py        what can be wrong with a setup: a code, a line and the fix for each
check_setup.py     findings that the file alone shows
predicted.py       findings that the planner shows, given a model and a cluster
"""
