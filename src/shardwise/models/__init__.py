"""Models: which one is meant, and its spec, its task or its weights.

specs/         what the planner knows of a model
tasks/         a model with its loss and its batches
weights/       checkpoint folders of the transformers library
reference.py   MODEL of the command line, as a value with these three questions

Shardwise's own models are here too, so that every claim can be checked without a download. `shapes.py` and
`catalogue.py` hold their dimensions as data (no torch), `make.py` builds the modules. `muon.py` is an optimizer and
`lean_loss.py` a loss for them; `hugging_face.py` translates their parameter names. The modules contain no parallelism.
"""
