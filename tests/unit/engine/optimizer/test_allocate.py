"""Where the state of an optimizer lies."""

import torch
from torch import nn

from shardwise.engine.optimizer.allocate import move_states, suit_devices


def stepped(device: str, **options: object) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.empty(2, device=device))
    optimizer = torch.optim.AdamW([{"params": [parameter], **options}])
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    return optimizer, parameter


def test_step_counts_are_moved_to_the_device_of_kernels_that_read_them() -> None:
    for options, device in (({"capturable": True}, "meta"), ({}, "cpu")):
        optimizer, parameter = stepped("meta", **options)
        suit_devices(optimizer, device=None)
        assert optimizer.state[parameter]["step"].device.type == device


def test_parameters_in_host_memory_are_not_stepped_by_capturable_kernels() -> None:
    optimizer, _ = stepped("cpu", capturable=True, lr=torch.tensor(0.5))
    suit_devices(optimizer, device=None)
    assert (optimizer.param_groups[0]["capturable"], optimizer.param_groups[0]["lr"]) == (False, 0.5)


def test_states_in_host_memory_stay_where_they_are_when_those_on_the_device_move() -> None:
    # Copies and updates that run meanwhile write them there.
    optimizer, parameter = stepped("meta")
    on_host = optimizer.state[parameter]["step"]
    optimizer.state[parameter]["exp_avg"] = on_device = torch.empty(2, device="meta")
    move_states(optimizer, device=torch.device("meta"), release_memory=lambda: None)
    assert optimizer.state[parameter]["step"] is on_host
    assert optimizer.state[parameter]["exp_avg"] is not on_device
