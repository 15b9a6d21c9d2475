"""Full states of optimizers, and the parts that a rank owns."""

import torch
from torch import nn

from shardwise.engine.optimizer.unsharded_state import place_counts


def test_step_counts_are_moved_to_the_device_of_kernels_that_read_them() -> None:
    parameters = [nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": parameters[:1], "capturable": True}, {"params": parameters[1:]}])
    for parameter in parameters:
        optimizer.state[parameter]["step"] = torch.tensor(3.0)
    place_counts(optimizer)
    assert [optimizer.state[parameter]["step"].device.type for parameter in parameters] == ["meta", "cpu"]
