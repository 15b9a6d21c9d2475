"""Shardwise's own models, so that every claim can be checked without a download.

`shapes.py` and `catalogue.py` hold their dimensions as data (no torch), `make.py` builds the modules. `muon.py` is an
optimizer and `lean_loss.py` a loss for them; `hugging_face.py` translates their parameter names. The modules contain
no parallelism.
"""
