"""The speed of host memory, measured on the hardware."""

import pytest
import torch

from shardwise.hardware import device_of
from shardwise.hardware.device import link_of
from shardwise.hardware.measuring.calibrate import measure_device
from shardwise.hardware.measuring.measure_host_memory import measured_host_memory
from shardwise.hardware.measuring.probe_host import probe_host

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_copies_are_slower_than_the_fastest_link_and_slower_still_in_both_directions() -> None:
    speed = measured_host_memory(torch.device("cuda", 0))
    fastest = device_of("gh200").host_link
    assert fastest is not None
    assert speed.copy_bytes_per_s < link_of(fastest.value).bytes_per_s.value
    assert speed.both_bytes_per_s < 1.1 * speed.copy_bytes_per_s
    assert speed.updates_per_s > 0


def test_calibrate_and_the_probe_measure_it() -> None:
    device = torch.device("cuda", 0)
    found = measure_device(device, only="host_memory")
    assert found["rows"] == []
    assert found["host_memory"]["copy_bytes_per_s"] > 0
    assert probe_host(device, seconds=0.1).memory is not None
