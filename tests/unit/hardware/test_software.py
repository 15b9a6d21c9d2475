"""How fast kernels are depends on the software of the day, on the architecture, and on what fp32 is multiplied as."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.errors import InvalidCluster, UnknownName
from shardwise.hardware import KINDS, cluster_of, device_of
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.device import CURRENT, Software, presets, reaches, software_of
from shardwise.hardware.kernel_model import Kernel, attention, product

H100, H200, A100, V100 = (device_of(name) for name in ("h100-80gb", "h200", "a100-80gb", "v100-32gb"))
ATTENTION = attention("bf16", (64.0, 4096.0, 4096.0, 128.0), backward=True, num_flops=2.0**41, num_bytes=2.0**28)
PRODUCT = product("bf16", (1.0, 8192.0, 8192.0, 8192.0), role="forward", num_bytes=3 * 2 * 8192.0**2)
PRODUCT_32 = product("fp32", (1.0, 8192.0, 8192.0, 8192.0), role="forward", num_bytes=3 * 4 * 8192.0**2)
UNALIGNED = product("bf16", (1.0, 8192.0, 50257.0, 1024.0), role="forward", num_bytes=2.0**30)
NORM = Kernel("rms_norm", "", 0.0, 2.0**28, (2.0**28, 1.0))
ADD = Kernel("add", "", 0.0, 2.0**28, (2.0**28, 1.0))


OLD = software_of("2023")


def test_every_reach_has_a_source_and_every_year_is_made_of_known_kernels() -> None:
    assert list(presets()) == ["2023", "2024", "current"]
    assert software_of("current") == CURRENT
    assert str(OLD) == "attention flash-1, matmul cuda-12, norms operations"
    for kernels in reaches().values():
        for kernel in kernels.values():
            for number in kernel.values():
                assert len(number.source) > 5
                assert number.kind in KINDS


def test_attention_is_slower_the_older_its_kernel() -> None:
    for device in (H100, A100, device_of("b200")):
        seconds = [
            kernel_model_of(replace(device, software=Software(attention=name))).seconds(ATTENTION)
            for name in ("cudnn", "flash-3", "flash-2", "flash-1", "math")
        ]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 3 * seconds[2]


@pytest.mark.parametrize("kernel", [ATTENTION, PRODUCT, NORM])
def test_kernels_of_2023_are_slower_than_those_of_today(kernel: Kernel) -> None:
    old = replace(H100, software=OLD)
    assert kernel_model_of(old).seconds(kernel) > 1.1 * kernel_model_of(H100).seconds(kernel)


def test_what_memory_bounds_is_as_fast_as_ever() -> None:
    assert kernel_model_of(replace(H100, software=OLD)).seconds(ADD) == kernel_model_of(H100).seconds(ADD)


def test_today_an_h100_multiplies_and_attends_as_an_h200_does() -> None:
    for kernel in (ATTENTION, PRODUCT):
        assert kernel_model_of(H100).seconds(kernel) == pytest.approx(kernel_model_of(H200).seconds(kernel), rel=0.15)


def test_the_shipped_calibration_is_that_of_today() -> None:
    old = replace(H200, software=OLD)
    assert kernel_model_of(old).seconds(ATTENTION) > 2 * kernel_model_of(H200).seconds(ATTENTION)


def test_a_device_that_was_calibrated_has_its_own_software() -> None:
    own = replace(H100, calibration=shipped_calibration("h200"))
    for kernel in (ATTENTION, PRODUCT, NORM):
        assert kernel_model_of(replace(own, software=OLD)).seconds(kernel) == kernel_model_of(own).seconds(kernel)


def test_tf32_is_used_where_torch_may_use_it() -> None:
    slow, fast = (kernel_model_of(replace(A100, matmul_precision=how)) for how in ("highest", "high"))
    assert 5 < slow.seconds(PRODUCT_32) / fast.seconds(PRODUCT_32) < 9
    assert slow.seconds(PRODUCT) == fast.seconds(PRODUCT)


def test_a_device_without_tf32_does_not_get_faster_by_allowing_it() -> None:
    slow, fast = (kernel_model_of(replace(V100, matmul_precision=how)) for how in ("highest", "high"))
    assert slow.seconds(PRODUCT_32) == fast.seconds(PRODUCT_32)


def test_fused_attention_in_fp16_is_as_fast_as_in_bf16() -> None:
    half = ATTENTION._replace(dtype="fp16")
    assert kernel_model_of(A100).seconds(half) == pytest.approx(kernel_model_of(A100).seconds(ATTENTION), rel=0.03)


def test_unaligned_products_go_with_the_processors_not_with_the_peak() -> None:
    # 2.7 times the peak, but 1.6 times the processors and clock.
    assert kernel_model_of(A100).seconds(UNALIGNED) < 2.2 * kernel_model_of(H200).seconds(UNALIGNED)


def test_unknown_software_is_one_line_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="2023"):
        software_of("2019")
    with pytest.raises(InvalidCluster, match="highest, high, medium"):
        replace(H100, matmul_precision="best")


def test_a_cluster_file_says_what_runs_on_it(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('devices_per_node = 8\ndevice = "h100"\nsoftware = "2023"\nmatmul_precision = "high"\n')
    device = cluster_of(str(path)).device
    assert (device.name, device.software, device.matmul_precision) == ("h100-80gb", OLD, "high")
    path.write_text('devices_per_node = 8\ndevice = "h100"\nsoftware = { attention = "flash-2" }\n')
    assert cluster_of(str(path)).device.software == Software(attention="flash-2")
    path.write_text('devices_per_node = 8\ndevice = "h100"\nsoftware = { attention = "flesh-2" }\n')
    with pytest.raises(InvalidCluster, match="did you mean flash-2"):
        cluster_of(str(path))
    path.write_text('devices_per_node = 8\ndevice = "h100"\nsoftware = 2023\n')
    with pytest.raises(InvalidCluster, match="ours.toml"):
        cluster_of(str(path))
