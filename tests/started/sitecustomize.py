"""Python imports this at the start of every process that a test starts (see tests/conftest.py).

Most of these processes import torch, do little, and end. A third of their time went into collecting garbage among the
objects of torch's import, which all stay: while they were imported, and once more at the end.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
# Registered first, called last.
atexit.register(gc.freeze)
