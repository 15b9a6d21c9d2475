"""A device without a calibration borrows one, and is as fast as its own peaks and processors say."""

from dataclasses import replace

import pytest

from shardwise.hardware import Device, Sourced, device_of
from shardwise.hardware.borrowed import BorrowedKernelModel, kernel_model_of
from shardwise.hardware.kernel_model import Kernel, attention, product

H200 = device_of("h200")
ADD = Kernel("add", "", 0.0, 2.0**30, (2.0**30, 1.0))
NORM = Kernel("batch_norm_backward", "", 0.0, 2.0**26, (2.0**26, 64.0))
PRODUCT = product("bf16", (1.0, 8192.0, 8192.0, 8192.0), role="forward", num_bytes=3 * 2 * 8192.0**2)
ATTENTION = attention("bf16", (64.0, 2048.0, 2048.0, 128.0), backward=False, num_flops=2.0**36, num_bytes=2.0**27)


def borrowed(device: Device) -> BorrowedKernelModel:
    return BorrowedKernelModel(device, lender=kernel_model_of(H200))


def times(number: Sourced[float] | None, factor: float) -> Sourced[float]:
    assert number is not None
    return replace(number, value=factor * number.value)


@pytest.mark.parametrize("kernel", [ADD, NORM, PRODUCT, ATTENTION])
def test_a_device_that_borrows_from_itself_is_as_fast_as_it_is(kernel: Kernel) -> None:
    own = kernel_model_of(H200).seconds(kernel)
    # Products are corrected by what was measured nearby only on the device itself.
    assert borrowed(replace(H200, name="twin")).seconds(kernel) == pytest.approx(
        own, rel=0.15 if kernel is PRODUCT else 0.05
    )


def test_what_memory_bounds_goes_with_the_bandwidth() -> None:
    slow = replace(H200, name="slow", memory_bytes_per_s=times(H200.memory_bytes_per_s, 0.5))
    assert borrowed(slow).seconds(ADD) == pytest.approx(2 * borrowed(H200).seconds(ADD), rel=0.05)
    assert borrowed(slow).seconds(NORM) < 1.5 * borrowed(H200).seconds(NORM)


def test_what_no_peak_bounds_goes_with_the_processors() -> None:
    slow = replace(H200, name="slow", processor_hz=times(H200.processor_hz, 0.5))
    assert borrowed(slow).seconds(NORM) > 1.5 * borrowed(H200).seconds(NORM)
    assert borrowed(slow).seconds(ADD) < 1.1 * borrowed(H200).seconds(ADD)


def test_a_fitted_reach_is_only_that_of_its_kernels() -> None:
    half = Sourced(value=0.5, source="a test", kind="fitted")
    slow = replace(H200, name="slow", attention_reach=half)
    assert borrowed(slow).seconds(ATTENTION) == pytest.approx(2 * borrowed(H200).seconds(ATTENTION), rel=0.05)
    assert borrowed(slow).seconds(PRODUCT) == borrowed(H200).seconds(PRODUCT)


def test_convolutions_in_fp32_use_tensor_cores_where_there_are_any() -> None:
    kernel = Kernel("convolution", "fp32", 1e12, 1e8, (2.0**20, 2.0**18, 100.0))
    a100, v100 = borrowed(device_of("a100-80gb")), borrowed(device_of("v100-32gb"))
    assert a100.seconds(kernel) < 1e12 / 19.5e12
    assert v100.seconds(kernel) > 1e12 / 15.7e12


def test_only_a_device_without_a_calibration_borrows_one() -> None:
    assert not isinstance(kernel_model_of(H200), BorrowedKernelModel)
    assert isinstance(kernel_model_of(device_of("l4")), BorrowedKernelModel)
