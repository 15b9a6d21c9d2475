"""Models of our own, so that every claim can be checked without a download.

`shapes.py` holds their dimensions as data (no torch); the other files hold the modules.
A block's forward holds no parallelism.
"""
