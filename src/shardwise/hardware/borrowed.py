"""The kernel model of a device: by its own calibration, or by one that it borrows. No torch here.

A kernel's time on the lender has two parts: what its peak (operations or bytes per second) alone would take, and the
rest: latencies, instructions, what no peak counts. The first scales with the device's own peak, the second with its
processors:

    seconds = (peak part of the device + rest · processors × clock of the lender / those of the device) / relative reach

The relative reach is that of the software's kernels on the device's architecture (software.toml); 1 where it says
nothing. A device of the table, or of a user's file, may have its own.
"""

from dataclasses import replace
from functools import lru_cache

from shardwise.hardware.calibration import Calibration, shipped_calibration
from shardwise.hardware.device import Device, device_of
from shardwise.hardware.fit import launches_of
from shardwise.hardware.host_speed import engine_factor, reference_host
from shardwise.hardware.kernel_model import Kernel, KernelModel

USUAL = "h200"
"""The device whose calibration stands in for what another's own does not say."""

_PEAK_SHARE = 0.9
"""The share of a peak that the best kernels reach: copies of the bandwidth, products of the operations."""

_QUIET_HOST = 0.72
"""The time to issue an operation on a host that is not shared, relative to the lender's. The host of the H200 was
shared: the median of a tiny operation was 10.5 µs, and 7.6 µs in the quietest twentieth of the time (host_seconds in
benchmarks/results/step_times_h200.json)."""


@lru_cache(maxsize=64)
def kernel_model_of(device: Device) -> KernelModel:
    """The kernel model of a device whose peaks are known: its own calibration, or a borrowed one."""
    own = device.calibration or shipped_calibration(device.name)
    if own is not None:
        return KernelModel(device, calibration=on_host(own, device=device), is_own=True)
    return BorrowedKernelModel(device, lender=kernel_model_of(device_of(USUAL)))


def on_host(calibration: Calibration, *, device: Device) -> Calibration:
    """The calibration with the device's own host in place of that which it was measured on, if one was probed."""
    host = device.host
    if host is None:
        return calibration
    # Of one rank, on a core of its own or with what others leave of it; ranks that share a core slow each other down.
    issued = launches_of(host.dispatch_rows, kernel_seconds=0.0, is_host=False)
    factor = issued["call"][0] * calibration.ranks_per_core / _call_seconds(calibration)
    update = {
        name: (factor * issue, factor * more, num_bytes, reach)
        for name, (issue, more, num_bytes, reach) in calibration.update.items()
    }
    if device.name != "cpu":
        return replace(calibration, launch_seconds=issued, update=update)
    # What issues is what computes: all of it takes longer.
    return replace(
        calibration,
        kernel_seconds=factor * calibration.kernel_seconds,
        reach={kernel: part / factor for kernel, part in calibration.reach.items()},
        launch_seconds={op: (factor * a, factor * b) for op, (a, b) in calibration.launch_seconds.items()},
        update={name: (issue, more, size, reach / factor) for name, (issue, more, size, reach) in update.items()},
    )


def _call_seconds(calibration: Calibration) -> float:
    """What a host needs to have one operation done."""
    known = calibration.launch_seconds
    return known.get("call", known["other"])[0]


def host_factor(device: Device) -> float:
    """How many times as long an engine's own calls take on the device's host as on that which they were fitted on."""
    calibration, reference = kernel_model_of(device).calibration, reference_host()
    if device.host is not None:
        return engine_factor(device.host, reference=reference) * calibration.ranks_per_core
    fitted = launches_of(reference.dispatch_rows, kernel_seconds=0.0, is_host=False)
    return _call_seconds(calibration) / fitted["call"][0]


class BorrowedKernelModel(KernelModel):
    """The kernel model of `device`, from that of a calibrated `lender`."""

    def __init__(self, device: Device, *, lender: KernelModel) -> None:
        issued = {op: (_QUIET_HOST * a, _QUIET_HOST * b) for op, (a, b) in lender.calibration.launch_seconds.items()}
        assumed = replace(lender.calibration, launch_seconds=issued)
        super().__init__(device, calibration=on_host(assumed, device=device), is_own=False)
        self.lender = lender
        self.processors = _processor_speed(device) / _processor_speed(lender.device)

    def _busy(self, kernel: Kernel) -> float:
        # Products that are not aligned are bound by the loads of single values, which go with the processors.
        if kernel.name == "matmul" and "aligned" not in kernel.role:
            return super()._busy(kernel)
        return self._transferred(kernel)

    def _transferred(self, kernel: Kernel) -> float:
        borrowed = _as_calibrated(kernel)
        dtype = kernel.dtype
        if dtype == "fp32" and kernel.name.startswith("convolution") and self.device.tf32_flops_per_s is not None:
            # torch's default: convolutions of fp32 values go over tensor cores where there are any for them.
            dtype = "tf32"
        peak_part = _peak_part(borrowed, self.lender, borrowed.dtype)
        rest = self.lender.seconds(borrowed) - self.lender.start_seconds(borrowed) - peak_part
        return _peak_part(kernel, self, dtype) + max(rest, 0.0) / self.processors


def _as_calibrated(kernel: Kernel) -> Kernel:
    """The kernel of the same elements in 16 bits, where only that is calibrated."""
    if kernel.name.startswith("convolution") and kernel.dtype != "bf16":
        return replace(kernel, dtype="bf16", num_bytes=kernel.num_bytes / (2 if kernel.dtype == "fp32" else 1))
    if kernel.name.startswith("batch_norm"):
        return replace(kernel, num_bytes=kernel.sizes[0])
    return kernel


def _peak_part(kernel: Kernel, model: KernelModel, dtype: str) -> float:
    peak = model.peak(dtype) if dtype else float("inf")
    return max(kernel.num_flops / peak, kernel.num_bytes / model.memory_bytes_per_s) / _PEAK_SHARE


def _processor_speed(device: Device) -> float:
    """Processors × clock; where it is not known, as the peak of matrix products."""
    if device.num_processors is None or device.processor_hz is None:
        assert device.fp32_flops_per_s is not None
        return device.fp32_flops_per_s.value / 256
    return device.num_processors.value * device.processor_hz.value
