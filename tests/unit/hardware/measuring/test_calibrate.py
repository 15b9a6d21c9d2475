"""Calibration: what is measured comes back as what is predicted, and what cannot be read is one line."""

import json
import runpy
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from typer.testing import CliRunner

from shardwise.base.errors import InvalidCluster, InvalidData
from shardwise.doors.cli.app import app
from shardwise.hardware import cluster_of, device_of
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.hardware.calibration import read_calibration, shipped_calibration
from shardwise.hardware.kernel_model import correction, product, product_seconds
from shardwise.hardware.measuring.device_file import device_like, device_table, write_table
from shardwise.hardware.measuring.fit import fit_calibration, fit_link, kernel_of_probe
from shardwise.hardware.measuring.measure import Stopwatch, kernel_of
from shardwise.hardware.measuring.nccl_tests import read_nccl_tests
from shardwise.hardware.measuring.probe import Probe, cpu_probes, cuda_probes, probe_of

ROOT = Path(__file__).parents[4]

NCCL_TESTS = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid  18654 on       host device  0 [0x07] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid  18654 on       host device  1 [0x0a] NVIDIA A100-SXM4-40GB
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    11.15    0.00    0.00      0    10.85    0.00    0.00      0
     8388608       2097152     float     sum      -1    113.2   74.10   74.10      0    112.9   74.30   74.30    N/A
   134217728      33554432     float     sum      -1    813.5  164.99  164.99      0    812.3  165.23  165.23      0
# Avg bus bandwidth    : 41.7
"""


def measured(device: str = "cuda", title: str = "NVIDIA H200") -> dict[str, Any]:
    """As of a device that reaches half of an H200's peaks in everything, and issues an operation in 10 µs."""
    model = kernel_model_of(replace(device_of("h200"), name="half"))
    rows: list[dict[str, Any]] = []
    for probe in cuda_probes() if device == "cuda" else cpu_probes():
        rows.append(probe.row(seconds=3e-6 + 2 * model.law(kernel_of_probe(probe))))
    rows += [
        {"name": "dispatch", "role": role, "forward": 1e-5, "backward": 1e-5} for role in ("linear", "add", "attention")
    ]
    for name in ("adamw-fused", "sgd"):
        for num_tensors, each, launch, seconds in (
            (8, 2**24, 2e-4, 1e-2),
            (50, 1024, 4e-4, 4e-4),
            (300, 1024, 2e-3, 2e-3),
        ):
            row = {"name": "update", "role": name, "num_tensors": num_tensors, "launch": launch, "seconds": seconds}
            rows.append(row | {"num_elements": num_tensors * each})
    return {"device": device, "title": title, "torch": "2.13.0", "seconds": 1.0, "left_out": 0, "rows": rows}


def test_what_was_measured_is_predicted(tmp_path: Path) -> None:
    data = measured()
    write_table(device_table(data), tmp_path / "mine.toml")
    model = kernel_model_of(cluster_of(str(tmp_path / "mine.toml")).device)
    for row in data["rows"]:
        if "dims" in row:
            assert model.seconds(kernel_of_probe(probe_of(row))) == pytest.approx(row["seconds"], rel=0.02), row


def test_the_file_is_a_cluster_with_what_was_not_measured_from_the_tables(tmp_path: Path) -> None:
    data = measured() | {"context_bytes": 123_456_789}
    ranks = [
        {"name": "all_reduce", "num_ranks": 4, "num_bytes": size, "seconds": 1e-5 + size / 1e11} for size in (8, 2**28)
    ]
    data["rows"] += ranks
    write_table(device_table(data), tmp_path / "mine.toml")
    cluster = cluster_of(str(tmp_path / "mine.toml"))
    assert (cluster.devices_per_node, cluster.device.name) == (4, "h200")
    assert cluster.device.context_bytes is not None
    assert cluster.device.context_bytes.value == 123_456_789
    assert cluster.device.bf16_flops_per_s == device_of("h200").bf16_flops_per_s
    assert cluster.link is not None
    assert cluster.link.bytes_per_s.kind == "fitted"


def test_a_cpu_has_the_peaks_that_were_measured(tmp_path: Path) -> None:
    write_table(device_table(measured("cpu", "x86_64")), tmp_path / "cpu.toml")
    device = cluster_of(str(tmp_path / "cpu.toml")).device
    assert device.name == "cpu"
    assert device.fp32_flops_per_s is not None
    assert device.fp32_flops_per_s.kind == "measured"
    assert device.memory_bytes_per_s is not None


def test_link_is_fitted_to_rings() -> None:
    """t = rounds · (latency + bytes / (n · bandwidth)), exactly, where a term is all of it."""
    rows = [
        {"name": name, "num_ranks": 4, "num_bytes": size, "seconds": rounds * (2e-6 + size / (4 * 100e9))}
        for name, rounds in (("all_reduce", 6), ("all_gather", 3))
        for size in (8, 2**34)
    ]
    link = fit_link(rows, source="a test")
    assert link is not None
    assert link["bytes_per_s"]["value"] == pytest.approx(100e9, rel=1e-3)
    assert link["latency_seconds"]["value"] == pytest.approx(2e-6, rel=1e-3)
    assert fit_link([], source="a test") is None


def test_nccl_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text(NCCL_TESTS)
    rows = read_nccl_tests(tmp_path / "out.txt")
    assert [row["num_bytes"] for row in rows] == [8, 8_388_608, 134_217_728]
    assert [row["seconds"] for row in rows] == pytest.approx([10.85e-6, 112.9e-6, 812.3e-6])
    assert {(row["name"], row["num_ranks"]) for row in rows} == {("all_reduce", 2)}


@pytest.mark.parametrize("text", ["", "# Rank 0\n# Rank 1\n", NCCL_TESTS.replace("#  Rank  1", "#"), "\x00 1 2 3"])
def test_other_text_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.txt").write_text(text)
    with pytest.raises(InvalidData, match="holds no table of nccl-tests") as caught:
        read_nccl_tests(tmp_path / "out.txt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_the_drivers_title_tells_the_device(title: str, name: str) -> None:
    assert device_like(title, kind="cuda").name == name


def test_a_device_of_no_table_has_the_peaks_that_were_measured(tmp_path: Path) -> None:
    write_table(device_table(measured(title="AMD Instinct MI250X")), tmp_path / "mine.toml")
    device = cluster_of(str(tmp_path / "mine.toml")).device
    assert device.name == "amd-instinct-mi250x"
    assert device.bf16_flops_per_s is not None
    assert device.bf16_flops_per_s.kind == "measured"
    assert 0 < device.bf16_flops_per_s.value < device_of("h200").flops_per_s("bf16").value


def test_a_correction_holds_at_its_point_and_fades() -> None:
    points = (((10.0, 10.0), 2.0), ((14.0, 10.0), 0.5))
    assert correction((2.0**10, 2.0**10), points=points) == pytest.approx(2.0, rel=0.02)
    assert correction((2.0**14, 2.0**10), points=points) == pytest.approx(0.5, rel=0.02)
    assert correction((2.0**12, 2.0**10), points=points) == pytest.approx(1.0)
    assert correction((2.0**40, 2.0**40), points=points[:1]) == pytest.approx(1.0, abs=0.01)
    assert correction((5.0,), points=()) == 1.0


def test_a_product_takes_whole_waves() -> None:
    """132 tiles are one wave; one more row of tiles is another."""
    full = product_seconds((1.0, 128.0 * 132, 256.0, 8192.0), flops_per_s=1e15, num_processors=132)
    more = product_seconds((1.0, 128.0 * 133, 256.0, 8192.0), flops_per_s=1e15, num_processors=132)
    assert more > 1.05 * full
    assert full > 2 * 128 * 132 * 256 * 8192 / 1e15


@pytest.mark.parametrize("probe", [probe for probe in cpu_probes() if max(probe.dims) <= 1024][::9], ids=str)
def test_every_kernel_can_be_timed(probe: Probe) -> None:
    assert Stopwatch(torch.device("cpu")).seconds(probe) > 0


@pytest.mark.parametrize("role", ["forward", "input", "weight", "forward rowwise", "input rowwise", "weight rowwise"])
def test_a_probe_in_fp8_multiplies_its_operands(role: str) -> None:
    """Also with a scale for each row: torch's own emulation on a CPU wants the shapes and strides that a GPU wants."""
    if role.endswith("rowwise") and torch.__version__ < TorchVersion("2.13"):
        pytest.skip("torch 2.11 emulates products with one scale per tensor only")
    kernel = kernel_of(Probe(name="matmul", dtype="fp8", dims=(64, 128, 32), role=role), device=torch.device("cpu"))
    found, expected = kernel.function(*kernel.inputs).float(), kernel.inputs[0].float() @ kernel.inputs[1].float()
    assert (found - expected).norm() <= 4e-3 * expected.norm()


def test_products_with_a_scale_for_each_row_have_their_own_speed() -> None:
    data = measured()
    for row in data["rows"]:
        if row.get("role", "").endswith(" rowwise"):
            row["seconds"] *= 1.5
    device = replace(device_of("h200"), calibration=fit_calibration(data, device=device_of("h200"), source="here"))
    one, each = (
        kernel_model_of(device).seconds(product("fp8", (1.0, 8192.0, 4096.0, 4096.0), role=role, num_bytes=1e8))
        for role in ("forward", "forward rowwise")
    )
    assert each == pytest.approx(1.5 * one, rel=0.02)


def test_the_shipped_calibration_is_what_the_measurements_give(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "fit_h200.py"))
    script["write"](tmp_path / "h200.toml")
    shipped = ROOT / "src" / "shardwise" / "hardware" / "calibrated" / "h200.toml"
    assert (tmp_path / "h200.toml").read_text() == shipped.read_text()


def test_a_calibration_is_written_and_read() -> None:
    shipped = shipped_calibration("h200")
    assert shipped is not None
    again = read_calibration(shipped.as_table(), key="again")
    assert again.as_table() == shipped.as_table()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kernel_seconds", -1.0, "must be a number that is not below 0"),
        ("kind", "guessed", "must be one of"),
        ("reach", 3, "must be a table"),
        ("launch_seconds", {"other": [1.0]}, "must be 2 numbers"),
        ("points", {"add": [[float("nan"), 1.0, 1.0]]}, "must be a number"),
        ("points", {"matmul forward bf16": [[1.0, 1.0]]}, "must be 5 numbers"),
        ("points", {"add": [[1e300, 1.0, 1.0]]}, "must be a number"),
        ("points", {"add": [[129.0, 1.0, 1.0]]}, "must be the log2 of a size"),
        ("launch_seconds", {"addmm": [1.0, 1.0]}, "other is missing"),
        ("update", {"sgd": [1.0, 1.0, 1.0, 1.0]}, "adamw-fused is missing"),
        ("reach", {"add": 0}, "must be above 0"),
    ],
)
def test_a_calibration_that_cannot_be_is_one_line(key: str, value: object, message: str) -> None:
    shipped = shipped_calibration("h200")
    assert shipped is not None
    with pytest.raises(InvalidCluster, match=message) as caught:
        read_calibration(shipped.as_table() | {key: value}, key="mine")
    assert f"mine.{key}" in str(caught.value)


def test_the_command_fits_measurements_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(measured()))
    (tmp_path / "nccl.txt").write_text(NCCL_TESTS)
    names = {
        option: str(tmp_path / name)
        for option, name in (("--rows", "rows.json"), ("--out", "mine.toml"), ("--nccl-tests", "nccl.txt"))
    }
    result = CliRunner().invoke(app, ["calibrate", *(word for pair in names.items() for word in pair)])
    assert result.exit_code == 0, result.output
    table = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert table["devices_per_node"] == 2
    assert table["link"]["bytes_per_s"]["value"] == pytest.approx(165.23e9, rel=0.01)


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_the_command_writes_nothing_of_what_is_no_measurement(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    result = CliRunner().invoke(
        app, ["calibrate", "--rows", str(tmp_path / "rows.json"), "--out", str(tmp_path / "o.toml")]
    )
    assert result.exit_code != 0
    assert isinstance(result.exception, InvalidData)
    assert not (tmp_path / "o.toml").exists()
