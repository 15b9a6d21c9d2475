"""Units as CUDA graphs: in any loop, a unit's forward and backward are replayed; everything between units is ordinary.

tracer.py              compiles units with torch's own tracer: what it finds are graphs, the rest runs in Python
trace_gaps.py          code that the tracer would trace wrongly
traced_graph.py        one such graph: a function of explicit inputs
traced_unit.py         a unit, its compiled forward, and why it may have to stay ordinary
checkpointed_calls.py  calls of units inside of torch.utils.checkpoint
pass_form.py           what must be equal for passes to have the same graphs
torch_modes.py         torch's global switches, which may change the kernels
graph_device.py        records and replays graphs on a CUDA device
graph_fills.py         the small memsets of a graph as kernels
graph_pool.py          a pool of the device's memory for graphs
not_captured.py        why something could not be recorded
static_place.py        a tensor at a fixed address, which may be lent to code outside of the graphs
given_inputs.py        the inputs of a call of a traced graph, and what must be equal for a replay
recorded_call.py       the two CUDA graphs of one call of a traced graph: forward and backward
leaf_edges.py          the ways by which autograd comes to a graph's inputs
handed_gradients.py    hands the gradients of a replayed backward over at once
replayed_call.py       a replayed call as a node of autograd
recorded_pass.py       the calls of one pass in order, which share memory
arena.py               memory for the graphs of passes; overlapping passes use several
slots.py               fixed addresses for gathered parameters
unit_calls.py          runs calls of units as the pass does
unit_graphs.py         decides for each pass: ordinary, traced, recorded or replayed (balance.py: whether graphs pay)
reports.py             lines that tell the user which units run as graphs
"""
