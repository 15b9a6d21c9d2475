"""torchtitan's memory estimation: torch's FSDPMemTracker on fake tensors and a group of absent ranks.

torchtitan's scripts/estimate builds the model under FakeTensorMode with a fake process group, applies fully_shard to
every block and to the root, and takes the tracker's peak of a second step. The same here, for language models of the
catalogue. It wants a GPU for its fake tensors; here they are on the CPU, and so is the kernel of attention.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.models.tasks import cross_entropy, token_task

Row = dict[str, Any]
_RESHARDS = {"fsdp": True, "shard_grad_op": False}


def torchtitans(row: Row) -> float | None:
    """Return the tracker's peak of allocated bytes; None for what torchtitan does not train."""
    shape = shape_of(row["model"])
    if not isinstance(shape, GPTShape | LlamaShape) or row["strategy"] not in _RESHARDS or row["engine"] != "torch":
        return None
    dist.init_process_group("fake", rank=0, world_size=row["num_ranks"], store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (row["num_ranks"],))
        with FakeTensorMode():
            return _peak(replace(shape, vocab_multiple=1), row=row, mesh=mesh)
    finally:
        dist.destroy_process_group()


def _peak(shape: GPTShape | LlamaShape, *, row: Row, mesh: dist.DeviceMesh) -> float:
    task = token_task(shape, seq=row["seq"], device="meta")
    model: Any = task.model
    dtype = torch.bfloat16 if row["precision"] == "bf16" else torch.float32
    how = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": _RESHARDS[row["strategy"]],
    }
    for index, block in enumerate(model.blocks):
        whole = checkpoint_wrapper(block) if row["recompute"] == "full" else block
        model.blocks[index] = whole
        fully_shard(whole, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=False)
    batch = tuple(torch.zeros(row["batch"], row["seq"], dtype=torch.int64) for _ in range(2))
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((batch,))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            cross_entropy(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
