"""`[auto] budget` on a GPU: this process takes no more of its memory.

torch's allocator keeps blocks that it does not need while the device has room. Held to the budget, it gives them back
before it asks for more, which is what the plan was solved for; a step that needs more all the same runs out of memory,
as it would on a device of that size.

Not where steps may be captured: their pool cannot give blocks back, so that a run could end for some holes in it.
"""

from contextlib import ExitStack

import torch

from shardwise.comm.agreement import exchange
from shardwise.comm.join import Place
from shardwise.train.auto_plan import ChosenPlan


def keep_to_budget(chosen: ChosenPlan, *, place: Place, held: ExitStack) -> None:
    """Until `held` closes, tensors have what the budget leaves them. Collective, of ranks with the same config."""
    budget = chosen.given.auto.budget_bytes
    if budget is None or place.device.type != "cuda" or chosen.may_capture(place.device):
        return
    outside = exchange(chosen.outside_bytes)[0]
    if outside is None:
        # The plan is a fixed one, and nothing was solved for the budget.
        return
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(max(budget - outside, 0) / total, 1.0), place.device)
    held.callback(torch.cuda.set_per_process_memory_fraction, 1.0, place.device)
