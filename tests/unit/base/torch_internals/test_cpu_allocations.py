"""LiveBytes counts what torch's allocator hands out and takes back."""

import subprocess
import sys

import pytest
import torch

from shardwise.base.torch_internals.cpu_allocations import LiveBytes


def test_blocks_of_known_sizes_freed_in_every_way() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)  # 4000 bytes
        with live.phase("step"):
            first = torch.zeros(500)  # + 2000
            second = torch.zeros(250, dtype=torch.float64)  # + 2000: the peak
            del first
            second.untyped_storage().resize_(0)
            second.untyped_storage().resize_(1600)
        with live.phase("rest"):
            second.untyped_storage().resize_(0)
        del kept
        with live.phase("end"):
            pass
    found = [live.peak_bytes("step"), live.end_bytes("step"), live.end_bytes("rest"), live.end_bytes("end")]
    assert found == [8000, 5600, 4000, 0]


def test_each_run_of_a_phase_can_be_asked_about() -> None:
    with LiveBytes() as live:
        for size in (100, 200, 50):
            with live.phase("step"):
                torch.zeros(size).zero_()
    assert [live.peak_bytes("step", run=run) for run in range(3)] == [400, 800, 200]
    assert [live.end_bytes("step", run=run) for run in range(3)] == [0, 0, 0]


def test_what_comes_and_goes_within_one_operation_is_scratch() -> None:
    def record(*, with_scratch: bool) -> LiveBytes:
        with LiveBytes(with_scratch=with_scratch) as live, live.phase("step"):
            # Nothing uses the first one, so it looks like what a kernel takes for itself.
            torch.empty(1000)
            torch.empty(10).zero_()
        return live

    every = record(with_scratch=True)
    assert [(one.num_bytes, one.is_scratch) for one in every.allocations] == [(4000, True), (40, False)]
    assert every.peak_bytes("step") == 4000
    assert record(with_scratch=False).peak_bytes("step") == 40


def test_autograds_allocations_are_seen_and_freed() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with LiveBytes() as live, live.phase("step"):
        (weight @ weight).sum().backward()
        weight.grad = None
    # The product, and at least one gradient of its size.
    assert live.peak_bytes("step") >= 2 * weight.nbytes
    assert live.end_bytes("step") == 0


@pytest.mark.whole
def test_a_recording_logs_nothing() -> None:
    code = "from shardwise.base.torch_internals.cpu_allocations import LiveBytes\nfor _ in range(2):\n    with LiveBytes():\n        pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
