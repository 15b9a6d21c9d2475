"""Measurements of this machine's devices and links, and the tables that follow from them.

calibrate.py     measures a device row by row: probe.py names the kernels, measure.py times them
measure_*.py     the host, copies to its memory, and several ranks at once; probe_host.py: a short look at the host
nccl_tests.py    reads the output of nccl-tests in the same form
fit.py           rows → the numbers of a device and of its link; device_file.py: the file that has them
"""
