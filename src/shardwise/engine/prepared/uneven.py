"""Ranks that have different amounts of data, and ranks that run out of it.

The engine averages gradients over ranks. That is the gradient of the mean over all samples only if every rank has
equally many; otherwise a loss has to be divided by the count of all ranks together.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.comm.groups.agreement import exchange
from shardwise.comm.groups.rank_progress import waiting_in
from shardwise.engine.engine import EngineParts
from shardwise.program.rules.demand import broadcast

Batch = TypeVar("Batch")


def mean_count(engine: EngineParts, count: float) -> float:
    """Return the mean over ranks of the number of samples, or tokens, that each holds: divide a summed loss by it.

        loss = cross_entropy(model(x), y, reduction="sum") / shardwise.mean_count(model, num_tokens)

    is the mean over all ranks' tokens, however many each has: Σ_r (l_r / mean) / W = Σ_r l_r / Σ_r n_r. In an
    accumulation, give every pass the count of this rank's whole step. Collective, and it waits for the other ranks.
    """
    passes = engine.core.setting.passes
    total = summed(count if passes.counts else 0.0, device=engine.device)
    return total / (passes.num_counting or engine.core.setting.groups.mesh.num_ranks)


def summed(count: float, *, device: torch.device) -> float:
    """Return the sum of a count over all ranks of the job."""
    total = torch.tensor(float(count), dtype=torch.float64, device=device)
    with waiting_in("mean_count"):
        dist.all_reduce(total)
    if not total.item() > 0:
        raise InvalidData(f"all ranks together hold a count of {total.item():g}: there is nothing to take the mean of")
    return total.item()


def join(engine: EngineParts, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield this rank's batches, then its last one again while any other rank has batches left.

        for batch in shardwise.join(model, loader):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    So every rank runs the loop equally often, and no rank waits for one that has finished. What a rank computes after
    its own batches does not count: averages are over the ranks that still have one, and BatchNorm's statistics come
    from one of those. Collective: one small exchange per batch.
    """
    if engine.core.setting.passes.num_counting is not None:
        raise InvalidModel("shardwise.join inside shardwise.join: one loop over batches at a time")
    try:
        yield from _joined(engine, iter(batches))
    finally:
        passes = engine.core.setting.passes
        passes.num_counting, passes.counts = None, True


def _joined(engine: EngineParts, mine: Iterator[Batch]) -> Iterator[Batch]:
    passes = engine.core.setting.passes
    last: Batch | None = None
    while True:
        batch = next(mine, None)
        counting = [rank for rank, has in enumerate(exchange(batch is not None)) if has]
        if not counting:
            break
        if last is None and len(counting) < engine.core.setting.groups.mesh.num_ranks:
            # A rank that never had a batch borrows one to run on.
            box = [batch]
            dist.broadcast_object_list(box, src=counting[0])
            last = box[0]
        last = batch if batch is not None else last
        passes.counts = batch is not None
        passes.num_counting = len(counting)
        passes.source = counting[0]
        assert last is not None
        yield last
    # The buffers come from a rank that had data to the end.
    engine.core.cursor.run(broadcast(engine.core.followed.context))
    passes.source = 0
