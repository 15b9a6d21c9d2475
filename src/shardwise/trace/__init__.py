"""Model → the trace of its step, on fake tensors: no weight is made, and a model of any size is traced on a laptop.

fake.py      parameters and batches without storage
gpu_kernels.py  attention and norms as the fused kernels that a GPU runs
compiled.py  units as torch.compile runs them
fused_graph.py  a compiled graph: which results get memory, and for how long
cut.py       of many equal blocks, a few are traced
recorder.py  every operation, every storage's birth and death
observe.py   one forward, loss and backward under the recorder, with marks where the step program has its rows
rows.py      the record → rows of the spec
trace.py     several sizes → laws
"""

from collections.abc import Collection

from shardwise.spec import ModelSpec
from shardwise.tasks import Task
from shardwise.trace.observe import Way
from shardwise.trace.trace import trace_model

__all__ = ["Way", "trace_model", "trace_task"]


def trace_task(
    task: Task, *, name: str, ways: Collection[tuple[str, str]], units: str = "auto", kernels: str = "cuda"
) -> ModelSpec:
    """The spec of a task, with a trace for each of `ways`: (computes in, recompute, or COMPILED's word for it).

    `kernels`: whose run, cuda or cpu.
    """
    return trace_model(
        task.model,
        loss=task.loss,
        make_batch=task.make_batch,
        name=name,
        policy=units,
        ways=[Way(computes_in=computes_in, recompute=recompute, device=kernels) for computes_in, recompute in ways],
    )
