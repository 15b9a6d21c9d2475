"""The memory of this host."""

import sys

import pytest

from shardwise.hardware.host_memory import free_host_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")
def test_this_machine_has_some() -> None:
    assert 2**20 < free_host_bytes() < 2**50
