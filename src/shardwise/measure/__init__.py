"""Measurements of a training beside its prediction, and their report.

profile/   the memory of a step, storage by storage, on one rank of a job of any size
bench/     the same training under several engines and strategies
report/    the step program, its costs and what was measured, as text and as HTML pages
"""
