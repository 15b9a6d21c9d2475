"""The speed of host memory: from the probe, from a calibration, or from the lender's over the device's own link."""

from dataclasses import replace

import pytest

from shardwise.hardware import cluster_of, device_of
from shardwise.hardware.calibration import read_host_speed, reference_host, shipped_calibration
from shardwise.hardware.host_memory_speed import HostMemorySpeed
from shardwise.planner.time.host_link import host_bytes_per_s, host_memory_speed

MEASURED = HostMemorySpeed(copy_bytes_per_s=11e9, both_bytes_per_s=7e9, updates_per_s=1e9)


def test_a_probed_host_goes_before_a_calibration_and_that_before_the_lenders() -> None:
    h200, h100 = device_of("h200"), device_of("h100-80gb")
    shipped = shipped_calibration("h200")
    assert shipped is not None
    assert host_memory_speed(h200) == shipped.host_memory
    calibrated = replace(h100, calibration=replace(shipped, host_memory=MEASURED))
    assert host_memory_speed(calibrated) == MEASURED
    probed = replace(MEASURED, updates_per_s=3e9)
    assert host_memory_speed(replace(calibrated, host=replace(reference_host(), memory=probed))) == probed


def test_a_device_without_a_calibration_has_the_lenders_speed_on_its_own_link() -> None:
    # PCI Express 4 instead of 5.
    lent, own = host_memory_speed(device_of("h200")), host_memory_speed(device_of("a100-80gb"))
    assert own.copy_bytes_per_s == pytest.approx(lent.copy_bytes_per_s / 2, rel=0.01)
    assert own.updates_per_s == lent.updates_per_s


def test_the_devices_of_a_node_share_its_memory() -> None:
    one, eight = cluster_of("1xh200"), cluster_of("8xh200")
    assert host_bytes_per_s(eight) == host_bytes_per_s(one)
    assert host_bytes_per_s(eight, both_ways=True) < 0.8 * host_bytes_per_s(one, both_ways=True)


def test_the_speed_of_a_host_is_written_and_read_with_its_memory() -> None:
    host = replace(reference_host(), memory=MEASURED)
    assert read_host_speed(host.to_data(), where="here") == host
    assert "memory" not in reference_host().to_data()
