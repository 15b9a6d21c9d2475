"""Step 5 of 5: the engine runs a plan. `prepare` changes a model and an optimizer so that an ordinary loop trains.

layout.py    where parameters lie in a flat buffer, and which slice belongs to which rank
flat.py      the buffers of a unit: gather, free, the owned slice
reduce.py    gradients: into a buffer, summed over ranks, back to the owner
guard.py     parameters that say so instead of crashing when they are read while freed
runner.py    events of a step → operations of the program
hooks.py     module and autograd hooks → events
optim.py     an optimizer that steps what the rank owns
state.py     full state dicts in and out
prepare.py   puts it together
"""
