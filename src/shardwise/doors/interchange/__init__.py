"""Translates plans into the config files of other tools, and their config files into plans.

exported.py        the files for a target, and the settings that it cannot express
to_….py            plan → files that the target runs unchanged
targets.py         the targets by name
foreign_setup.py   the settings of another tool's file, as a plan
setting_values.py  reads the values of that file: switches, counts, class names
from_….py          that tool's keys → a plan
recognise.py       finds the tool that a file belongs to, and reads the file
mistakes.py        the mistakes that a setup can have, by code
check_setup.py     finds the mistakes that the file alone shows
predicted.py       finds the mistakes that the planner shows, given a model and a cluster
"""
