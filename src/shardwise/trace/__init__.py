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

from collections.abc import Collection
from dataclasses import replace

from shardwise.plan.policy import AUTO_UNITS
from shardwise.spec import ModelSpec
from shardwise.tasks import Task
from shardwise.trace.observe import Way
from shardwise.trace.trace import trace_model

__all__ = ["Way", "trace_model", "trace_task"]


def trace_task(
    task: Task,
    *,
    name: str,
    ways: Collection[tuple[str, str]],
    kernels: str = "cuda",
    fp8: Collection[str] = (),
    policy: str = AUTO_UNITS,
) -> ModelSpec:
    """Return the spec of a task with a trace for each of `ways`: (computes in, recompute or its COMPILED value).

    `kernels`: the device whose kernels are traced, cuda or cpu. `fp8`: weights that are multiplied in fp8 in ways that
    compute so. `policy` cuts the model into units.
    """
    traced = trace_model(
        task.model,
        loss=task.loss,
        make_batch=task.make_batch,
        name=name,
        ways=[Way(computes_in=computes_in, recompute=recompute, device=kernels) for computes_in, recompute in ways],
        fp8=fp8,
        policy=policy,
    )
    return replace(traced, seq=task.tokens_per_sample)
