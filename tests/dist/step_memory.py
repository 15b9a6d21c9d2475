"""The memory of a training step on a CPU, as a rank measures it: tensor by tensor."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from live import LiveTensors, Silent

from shardwise.comm.job.absent import leave_out_reduce
from shardwise.engines import accumulate, prepare
from shardwise.models.tasks import Task
from shardwise.plan import Plan

NUM_STEPS = 3


@contextmanager
def alike_ranks() -> Iterator[None]:
    """Ranks that compute and talk as predictions have it.

    Convolutions are predicted as oneDNN's; ranks have it turned off. And what ranks tell each other would be freed by
    Gloo's threads, which are not followed; they are all alike, so each can answer for all.
    """
    torch.set_num_threads(1)

    def alike(value: Any, group: Any = None) -> list[Any]:
        return [value] * dist.get_world_size()

    with ExitStack() as patched:
        patched.enter_context(torch.backends.mkldnn.flags(enabled=True))
        for home in ("comm.groups.agreement", "engine.guards.first_inputs"):
            patched.enter_context(patch(f"shardwise.{home}.exchange", alike))
        patched.enter_context(
            patch("shardwise.comm.groups.agreement.largest", lambda numbers, group=None: list(numbers))
        )
        yield


def wait_for_backend(tensors: list[torch.Tensor]) -> None:
    """Until Gloo's threads have let go of what was broadcast: what they free last is freed unseen, and counts on."""
    deadline = time.monotonic() + 10
    # The tensor's own use of its storage, and that of the question.
    while any(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2 for tensor in tensors):
        assert time.monotonic() < deadline, "somebody still holds the parameters of before prepare"
        time.sleep(0.001)


def adamw(model: Any) -> torch.optim.Optimizer:
    # foreach=False: on a CPU that is torch's choice, but it changes from version to version.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def step_bytes(
    make_task: Callable[[], Task],
    *,
    plan: Plan,
    batch: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> tuple[int, int]:
    """(peak of a step, what is left after it): the least of several steps.

    They are equal but for what the backend's threads free unseen; that only adds.
    """
    with LiveTensors() as live:
        task = make_task()
        model: Any = task.model
        made = optimizer(model)
        originals = [parameter.data for parameter in model.parameters()]
        own = plan.engine == "shardwise"
        model, made = prepare(model, made, plan, collectives=Silent() if own else None)
        if own:
            wait_for_backend(originals)
        else:
            leave_out_reduce(model)
        del originals
        samples = task.make_batch(batch)
        for _ in range(NUM_STEPS):
            with live.phase("step"):
                for number in range(1, plan.accumulate + 1):
                    with accumulate(model, enabled=number < plan.accumulate):
                        loss = task.loss(model, samples)
                        loss.backward()
                made.step()
                made.zero_grad()
            del loss
    warm = range(1, NUM_STEPS)
    return min(live.peak_bytes("step", run=run) for run in warm), min(live.end_bytes("step", run=run) for run in warm)
