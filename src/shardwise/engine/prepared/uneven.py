"""Ranks that have different amounts of data, and ranks that run out of it.

The engine averages gradients over ranks. That is the gradient of the mean over all samples only if every rank has
equally many; otherwise a loss has to be divided by the count of all ranks together.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.agreement import exchange
from shardwise.comm.rank_progress import waiting_in
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.protocol import Batch
from shardwise.errors import InvalidData, InvalidModel
from shardwise.program.rules.demand import broadcast


def mean_count(model: nn.Module, count: float) -> float:
    """Return the mean over ranks of a count of samples or tokens, by which a summed loss is divided.

        loss = cross_entropy(model(x), y, reduction="sum") / shardwise.mean_count(model, num_tokens)

    gives Σ losses / Σ counts over all ranks for any counts: Σ_r (l_r / mean) / W = Σ_r l_r / Σ_r n_r. In an
    accumulation pass the count of the complete step in every pass. Collective; it waits for the other ranks.
    """
    engine = engine_of(model)
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


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield this rank's batches, then its last one again while any other rank has some left.

    Every rank then runs the loop, and all its collectives, equally often. The passes of a rank that has run out do not
    count: its gradients are not added, averages are over the ranks that have a batch, and BatchNorm's statistics come
    from one of those. Collective: one small exchange per batch.
    """
    engine = engine_of(model)
    if engine.core.setting.passes.num_counting is not None:
        raise InvalidModel("shardwise.join inside shardwise.join: one loop over batches at a time")
    try:
        yield from _joined(engine, iter(batches))
    finally:
        passes = engine.core.setting.passes
        passes.num_counting, passes.counts = None, True


def _joined(engine: Engine, mine: Iterator[Batch]) -> Iterator[Batch]:
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
