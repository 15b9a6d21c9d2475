"""The fp8 probes of `calibrate` run on the hardware, multiply what they should, and take a plausible time."""

import pytest
import torch

from shardwise.hardware import device_of
from shardwise.hardware.measuring.calibrate import measure_device
from shardwise.hardware.measuring.fit import kernel_of_probe
from shardwise.hardware.measuring.measure import Stopwatch, kernel_of
from shardwise.hardware.measuring.probe import ROLES, Probe

_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HAS_FP8, reason="needs a CUDA device with fp8")]

KINDS = [f"{role}{scales}" for role in ROLES for scales in ("", " rowwise")]


def probe_of(role: str, *dims: int) -> Probe:
    return Probe(name="matmul", dtype="fp8", dims=dims, role=role)


@pytest.mark.parametrize("role", KINDS)
def test_a_probe_multiplies_its_operands(role: str) -> None:
    kernel = kernel_of(probe_of(role, 256, 512, 128), device=torch.device("cuda"))
    left, right = kernel.inputs
    found = kernel.function(left, right)
    assert found.dtype is torch.bfloat16
    expected = left.float() @ right.float()
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("role", KINDS)
def test_a_large_product_is_faster_than_in_bf16_and_slower_than_the_peak(role: str) -> None:
    watch = Stopwatch(torch.device("cuda"))
    probe = probe_of(role, 8192, 4096, 4096)
    seconds = watch.seconds(probe)
    in_bf16 = watch.seconds(Probe(name="matmul", dtype="bf16", dims=probe.dims, role=role.partition(" ")[0]))
    assert seconds < in_bf16
    fastest = device_of("b300").fp8_flops_per_s
    assert fastest is not None
    assert kernel_of_probe(probe).num_flops / seconds < fastest.value


def test_only_its_rows_are_measured_and_none_fails() -> None:
    found = measure_device(torch.device("cuda", 0), only="fp8", limit_seconds=60.0)
    assert {row["dtype"] for row in found["rows"]} == {"fp8"}
    assert [row for row in found["rows"] if "error" in row] == []
    assert found["left_out"] == 0
