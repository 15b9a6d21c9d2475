"""Model → the trace of its step, on fake tensors: no weights are made, so a laptop can trace a model of any size.

fake.py         parameters and batches without storage
gpu_kernels.py  attention, norms and dropout as the fused kernels of a GPU
compiled.py     units as torch.compile runs them
fused_graph.py  a compiled graph: which results get memory, and for how long
fp8.py          linear layers that multiply in fp8
cut.py          traces only a few of many equal blocks
values.py       values that follow from the batch alone
recorder.py     every operation, every allocation and release of a storage
observe.py      one forward, loss and backward under the recorder, with a mark at every row of the step program
rows.py         the record → rows of the spec
trace.py        several sizes → laws
"""

from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model

__all__ = ["Way", "trace_model"]
