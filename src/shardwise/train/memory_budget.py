"""`[auto] budget` on a GPU: the limit on the memory of this process.

torch's allocator keeps unused blocks while the device has room. Limited to the budget, it frees them before it asks
for more, which is what the plan was solved for; a step that still needs more runs out of memory, as it would on a
device of that size. There is no limit where steps may be captured: their pool cannot free blocks, so a run could fail
because of fragmentation.
"""

from contextlib import ExitStack

import torch

from shardwise.comm.agreement import exchange
from shardwise.comm.join import Place
from shardwise.train.auto_plan import ChosenPlan


def limit_to_budget(chosen: ChosenPlan, *, place: Place, held: ExitStack) -> None:
    """Limit the memory of tensors to the budget until `held` closes. Collective, of ranks with the same config."""
    budget = chosen.given.auto.budget_bytes
    if budget is None or place.device.type != "cuda" or chosen.may_capture(place.device):
        return
    outside = exchange(chosen.outside_bytes)[0]
    if outside is None:
        # A fixed plan, which was not solved for the budget.
        return
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(max(budget - outside, 0) / total, 1.0), place.device)
    held.callback(torch.cuda.set_per_process_memory_fraction, 1.0, place.device)
