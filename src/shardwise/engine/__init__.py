"""Step 5 of 5: the engine runs a plan. `prepare` changes a model and an optimizer so that an ordinary loop trains.

layout.py      where parameters lie in a flat buffer, and which slice belongs to which rank
flat.py        the buffers of a unit's parameters: gather, free, the owned slice
guard.py       parameters that say so instead of crashing when they are read while freed
unit.py        a unit at work: whole, arrived, at rest
reduce.py      gradients: into a buffer, summed over ranks, back to the owner; queue.py: in the program's order
used.py        which parameters were used, on any rank
runner.py      events of a step → operations of the program
walk.py        where a rank stands in the program; learn.py: the first step, which finds the order
hooks.py       module and autograd hooks → events
optim.py       an optimizer that steps what the rank owns
clip.py        the norm of gradients that lie in slices; scaler.py: their scale, in fp16
accumulate.py  several backwards in one step; uneven.py: ranks that hold different amounts; passes.py: how a pass counts
state.py       full state dicts in and out
model.py       what a prepared model answers differently
tape.py        the operations that a run issued
held.py        the bytes that a rank holds
precision.py   which dtype computes, which is stepped, which sums
recompute.py   activations computed again in backward; selective.py: all but products
offload.py     activations that wait in host memory; host.py: states that live there; lane.py: the copies; saved.py
wrap.py        which units are recomputed and offloaded
values.py      parameters and buffers that come from one rank
agreement.py   what ranks must have been given alike
prepare.py     puts it together; engine.py is the result, which the model carries
"""
