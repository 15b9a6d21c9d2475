"""Units as CUDA graphs: in any loop, a unit's forward and backward are replayed; everything between units is ordinary.

call_form.py       the form of a unit's inputs and the modes it runs in: what must be equal for a replay
watched_unit.py    a unit's Python state and parameters, and why it may have to stay ordinary
graph_device.py    records and replays graphs on a CUDA device
static_place.py    a tensor at a fixed address, which may be lent to code outside of the graphs
recorded_call.py   the two graphs of one call: forward and backward
replayed_call.py   a replayed call as a node of autograd
recorded_pass.py   the calls of one pass in order, which share memory
arena.py           memory for the graphs of passes; overlapping passes use several
slots.py           fixed addresses for gathered parameters
unit_graphs.py     decides for each pass: ordinary, observed, recorded or replayed
"""
