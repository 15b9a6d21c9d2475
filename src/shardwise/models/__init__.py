"""Models: which one is meant, and its spec, its task or its weights.

reference.py   MODEL of the command line, as a value with these three questions
catalogue.py   the models by name, with their dimensions (shapes.py); no torch here. make.py builds the modules
specs/         what the planner knows of a model; trace/ finds it out, on fake tensors
tasks/         a model with its loss and its batches; data/: what they are of
weights/       checkpoint folders of the transformers library
own/           Shardwise's own models
muon.py        an optimizer for them
"""
