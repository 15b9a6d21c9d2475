"""The kernel model of a device, from its own calibration or from a borrowed one. No torch here.

A kernel's time on the lender has two parts: the time at its peak (operations or bytes per second), and the rest:
latencies, instructions, everything no peak counts. The first scales with the device's own peak, the second with its
processors:

    seconds = (peak part of the device + rest · processors × clock of the lender / those of the device) / relative reach

The relative reach is that of the software's kernels on the device's architecture (software.toml; default 1). A device
of the table, or of a user's file, may have its own.
"""

from dataclasses import replace
from functools import lru_cache

from shardwise.hardware.calibration import Calibration, engine_factor, launches_of, reference_host, shipped_calibration
from shardwise.hardware.device import Device, device_of
from shardwise.hardware.kernel_model import Kernel, KernelModel

USUAL = "h200"
"""The lender: the device whose calibration is used for devices without one."""

_PEAK_SHARE = 0.9
"""The share of a peak that the best kernels reach: copies of the bandwidth, matrix products of the operations."""

_QUIET_HOST = 0.72
"""Time to issue an operation on a host that is not shared, relative to the lender's. The host of the H200 was shared: a
tiny operation took 10.5 µs in the median and 7.6 µs in the quietest twentieth of the time (host_seconds in
benchmarks/results/step_times_h200.json)."""


@lru_cache(maxsize=64)
def kernel_model_of(device: Device) -> KernelModel:
    """Return the kernel model of a device whose peaks are known, from its own calibration or from a borrowed one."""
    own = device.calibration or shipped_calibration(device.name)
    if own is not None:
        return KernelModel(device, calibration=on_host(own, device=device), is_own=True)
    return BorrowedKernelModel(device, lender=kernel_model_of(device_of(USUAL)))


def on_host(calibration: Calibration, *, device: Device) -> Calibration:
    """Return the calibration for the device's own host, if that was probed."""
    host = device.host
    if host is None:
        return calibration
    # The probe is one rank; ranks that share a core slow each other down.
    issued = launches_of(host.dispatch_rows, kernel_seconds=0.0, is_host=False)
    factor = issued["call"][0] * calibration.ranks_per_core / _call_seconds(calibration)
    update = {
        name: (factor * issue, factor * more, num_bytes, reach)
        for name, (issue, more, num_bytes, reach) in calibration.update.items()
    }
    if device.name != "cpu":
        return replace(calibration, launch_seconds=issued, update=update)
    # The CPU that issues also computes: everything takes longer.
    return replace(
        calibration,
        kernel_seconds=factor * calibration.kernel_seconds,
        reach={kernel: part / factor for kernel, part in calibration.reach.items()},
        launch_seconds={op: (factor * a, factor * b) for op, (a, b) in calibration.launch_seconds.items()},
        update={name: (issue, more, size, reach / factor) for name, (issue, more, size, reach) in update.items()},
    )


def _call_seconds(calibration: Calibration) -> float:
    """Return the host's time for one operation, including its issue."""
    known = calibration.launch_seconds
    return known.get("call", known["other"])[0]


def host_factor(device: Device) -> float:
    """Return the slowdown of an engine's own calls on the device's host relative to the reference host."""
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
        # Unaligned matrix products are bound by loads of single values, which scale with the processors.
        if kernel.name == "matmul" and "aligned" not in kernel.role:
            return super()._busy(kernel)
        return self._transferred(kernel)

    def _transferred(self, kernel: Kernel) -> float:
        borrowed = _as_calibrated(kernel)
        dtype = kernel.dtype
        if dtype == "fp32" and kernel.name.startswith("convolution") and self.device.tf32_flops_per_s is not None:
            # torch's default: fp32 convolutions use TF32 tensor cores.
            dtype = "tf32"
        peak_part = _peak_part(borrowed, self.lender, borrowed.dtype)
        rest = self.lender.seconds(borrowed) - self.lender.start_seconds(borrowed) - peak_part
        return _peak_part(kernel, self, dtype) + max(rest, 0.0) / self.processors


def _as_calibrated(kernel: Kernel) -> Kernel:
    """Return the kernel over the same elements in 16 bits, if only that is calibrated."""
    if kernel.name.startswith("convolution") and kernel.dtype != "bf16":
        return kernel._replace(dtype="bf16", num_bytes=kernel.num_bytes / (2 if kernel.dtype == "fp32" else 1))
    if kernel.name.startswith("batch_norm"):
        return kernel._replace(num_bytes=kernel.sizes[0])
    return kernel


def _peak_part(kernel: Kernel, model: KernelModel, dtype: str) -> float:
    peak = model.peak(dtype) if dtype else float("inf")
    return max(kernel.num_flops / peak, kernel.num_bytes / model.memory_bytes_per_s) / _PEAK_SHARE


def _processor_speed(device: Device) -> float:
    """Return processors × clock; if unknown, an estimate from the fp32 peak."""
    if device.num_processors is None or device.processor_hz is None:
        assert device.fp32_flops_per_s is not None
        return device.fp32_flops_per_s.value / 256
    return device.num_processors.value * device.processor_hz.value
