"""The kernel model: the time of a kernel as a law of its sizes, corrected by measurements nearby. No torch here.

    seconds = kernel_seconds + max(operations / (peak · reach), bytes / (bandwidth · reach)), × a correction

The operations of matrix products and attention include what their tiles waste (`product_seconds`, `attention_excess`;
their constants are fitted to benchmarks/results/calibrate_h200.json). Peaks come from the datasheet; `reach` and the
corrections come from the device's calibration or, if it has none, from an H200's (borrowed.py).
"""

from math import ceil, exp, log, log2
from typing import NamedTuple

from shardwise.hardware.calibration import Calibration, Points
from shardwise.hardware.device import Device

# Rows and columns of the tile of a matrix product that one processor computes at a time.
_TILES = tuple((rows, columns) for rows in (64, 128, 192, 256) for columns in (64, 96, 128, 160, 192, 256))
# The most sums of a tile that fit into a processor's registers.
_MOST_VALUES = 256 * 160
# A tile reads rows + columns values for rows · columns products: with this many products per value it has half speed.
_HALF_SPEED = 16.0
# (rows, columns, operations per step of k, scaled up by the loss of speed).
_WORK = tuple(
    (rows, columns, 2 * (rows * columns + _HALF_SPEED * (rows + columns)))
    for rows, columns in _TILES
    if rows * columns <= _MOST_VALUES
)
# With more waves than these, it no longer matters how full the last one is.
_MANY_WAVES = 8
# Start and end of a tile, in steps of k.
_RAMP = 100.0
# Time of a matrix product before its first tile and after its last.
_START_SECONDS = 2e-6
# Attention: queries and keys per block; loss of a row of blocks at its start and at its diagonal, in keys; softmax of a
# score, in products; loss of the last wave, in full waves.
_BLOCK, _KEY_RAMP, _DIAGONAL, _SOFTMAX, _LAST_WAVE = 128, 128.0, 512.0, 64.0, 1.0
# Multiple of 16-bit values at which rows begin → its name in kernel roles. At 8, every load has the full 16 bytes.
_ALIGNED = {8: "", 4: " aligned to 4", 2: " aligned to 2", 1: " unaligned"}
# The numbers of parts into which k is cut if a matrix product has few rows and columns.
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_SPLIT = 512
# A point at this distance (in octaves) has the weight of "no correction".
_FAR = 2.0
_NEAR = 0.1

# Dtype → those whose peak stands in for it.
_WIDER = {"bf16": ("fp16", "fp32"), "fp16": ("fp16", "fp32"), "fp8": ("bf16", "fp16", "fp32")}

# Attention does not get faster beyond this many keys, and this many queries of all heads.
_LONGEST = 8192.0
_MOST_ROWS = 2.0**18


class Kernel(NamedTuple):
    """A kernel at one size: the name of its probe, its dtype and role. A tuple, because they are keys.

    sizes   its coordinates among calibrated points; of a matrix product (count, m, n, k)
    """

    name: str
    dtype: str
    num_flops: float
    num_bytes: float
    sizes: tuple[float, ...]
    role: str = ""

    @property
    def key(self) -> str:
        """The key of its reach and its points in a calibration."""
        return " ".join(part for part in (self.name, self.role, self.dtype) if part)


BY_COLUMNS = (
    "layer_norm",
    "layer_norm_backward",
    "rms_norm_backward",
    "column_sum",
    "batch_norm",
    "batch_norm_backward",
)
"""Memory-bound kernels whose time also depends on the number of columns (or channels)."""


def product(dtype: str, sizes: tuple[float, ...], *, role: str, num_bytes: float) -> Kernel:
    """Return the kernel of `count` matrix products of (m, n, k). Its role names the alignment of rows to 16 bytes."""
    count, m, n, k = sizes
    inner = (m, n) if role.startswith("weight") else (n, k)
    if dtype != "fp32":
        role += next(name for values, name in _ALIGNED.items() if not any(size % values for size in inner))
    return Kernel("matmul", dtype, 2 * count * m * n * k, num_bytes, sizes, role=role)


def attention(dtype: str, dims: tuple[float, ...], *, backward: bool, num_flops: float, num_bytes: float) -> Kernel:
    """Return fused attention of (batch · heads, queries, keys, width); causal if `num_flops` is less than all products.

    Its sizes are these and the bytes per query, which are fewer if heads share keys and values.
    """
    heads, queries, keys, width = dims
    everything = (5 if backward else 2) * 2 * heads * queries * keys * width
    role = "causal" if num_flops < everything else "full"
    name = "attention_backward" if backward else "attention"
    # Beyond the size that fills a device the speed is constant, so the points of that size are used.
    rows, columns = min(queries, _LONGEST), min(keys, _LONGEST)
    sizes = (min(heads, _MOST_ROWS / rows), rows, columns, width, num_bytes / (heads * queries))
    return Kernel(name, dtype, num_flops, num_bytes, sizes, role=role)


def strided(name: str, elements: float, *, num_bytes: float) -> Kernel:
    """Return an elementwise kernel on operands of different layouts: computing addresses takes longer than moving data.

    So its time depends on the elements; its size is the bytes read and written for as many 16-bit elements.
    """
    return Kernel("strided_cat" if name == "cat" else "strided", "", 0.0, num_bytes, (max(4 * elements, 1.0), 1.0))


class KernelModel:
    """Times of kernels on one kind of device; `is_own`: the calibration was measured on it."""

    def __init__(self, device: Device, *, calibration: Calibration, is_own: bool) -> None:
        assert device.memory_bytes_per_s is not None
        self.device = device
        self.calibration = calibration
        self.is_own = is_own
        self.memory_bytes_per_s = device.memory_bytes_per_s.value
        self.num_processors = device.num_processors.value if device.num_processors is not None else 1
        self._tiled = self.num_processors > 1
        self._seen: dict[Kernel, float] = {}

    def seconds(self, kernel: Kernel) -> float:
        found = self._seen.get(kernel)
        if found is None:
            computed = self._as_computed(kernel)
            found = self.start_seconds(computed) + self._busy(computed) / relative_reach(self.device, computed)
            if self.is_own:
                found *= correction(computed.sizes, points=self.calibration.points.get(computed.key, ()))
            self._seen[kernel] = found
        return found

    def _as_computed(self, kernel: Kernel) -> Kernel:
        """Return the kernel in TF32 if torch multiplies fp32 values that way."""
        is_allowed = self.device.matmul_precision != "highest" and self.device.tf32_flops_per_s is not None
        if is_allowed and kernel.dtype == "fp32" and (kernel.name == "matmul" or kernel.name.startswith("attention")):
            return kernel._replace(dtype="tf32")
        return kernel

    def _busy(self, kernel: Kernel) -> float:
        """Return the kernel's time without its start."""
        return self.law(kernel) / self._reach(kernel)

    def start_seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel that does not depend on its size."""
        return self.calibration.kernel_seconds + (_START_SECONDS if kernel.name == "matmul" and self._tiled else 0.0)

    def law(self, kernel: Kernel) -> float:
        """Return the seconds at the device's peaks, which no kernel reaches."""
        peak = self.peak(kernel.dtype)
        computed = kernel.num_flops / peak
        if kernel.name == "matmul" and self._tiled:
            computed = product_seconds(kernel.sizes, flops_per_s=peak, num_processors=self.num_processors)
        elif kernel.name.startswith("attention") and self._tiled:
            computed *= attention_excess(
                kernel.sizes, is_causal=kernel.role == "causal", num_processors=self.num_processors
            )
        num_bytes = kernel.sizes[0] if kernel.name.startswith("strided") else kernel.num_bytes
        return max(computed, num_bytes / self.memory_bytes_per_s)

    def _reach(self, kernel: Kernel) -> float:
        """Return the calibrated reach; if unknown, that of the same kernel in another dtype, or of an addition."""
        reach = self.calibration.reach
        # Without the kind of scales of a product in fp8.
        role = kernel.role.replace(" rowwise", "")
        for key in (
            kernel.key,
            f"{kernel.name} {kernel.role.partition(' aligned to')[0]} unaligned {kernel.dtype}",
            f"{kernel.name} {role} {kernel.dtype}",
            f"{kernel.name} {role} bf16",
            f"{kernel.name} {kernel.dtype}",
            kernel.name,
            "add",
        ):
            if key in reach:
                return reach[key]
        return 1.0

    def peak(self, dtype: str) -> float:
        """Return the peak in a dtype; without one of its own, that of the next wider dtype that has one."""
        for name in (dtype, *_WIDER.get(dtype, ("fp32",))) if dtype else ("fp32",):
            peak = self.device.flops_per_s(name)
            if peak is not None:
                return peak.value
        raise AssertionError(f"{self.device.name} has no peak")


def relative_reach(device: Device, kernel: Kernel) -> float:
    """Return the speed of a kernel on a device, relative to the prediction from the lender's calibration."""
    if device.calibration is not None:
        # It was measured with the software that runs on it.
        return 1.0
    name = "attention" if kernel.name.startswith("attention") else kernel.name
    own = {"matmul": device.matmul_reach, "attention": device.attention_reach}.get(name)
    if own is not None:
        return own.value
    return device.software.reach(name, dtype=kernel.dtype, architecture=device.architecture)


def product_seconds(sizes: tuple[float, ...], *, flops_per_s: float, num_processors: int) -> float:
    """Return the time of `count` products of m × k with k × n, cut into tiles that the processors compute in waves.

    A last wave with few tiles takes as long as a full one. The library chooses the fastest way to cut.
    """
    count, m, n, k = sizes
    best = float("inf")
    for rows, columns, work in _WORK:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        for split in _SPLITS:
            if split > 1 and (k / split < _LEAST_SPLIT or tiles > _MANY_WAVES * num_processors):
                break
            best = min(best, ceil(tiles * split / num_processors) * work * (k / split + _RAMP))
    return best * num_processors / flops_per_s


def attention_excess(sizes: tuple[float, ...], *, is_causal: bool, num_processors: int) -> float:
    """Return the time of fused attention relative to that of its operations.

    Queries and keys come in blocks. A row of blocks takes time to start, and with a causal mask half of each block on
    the diagonal is wasted. The softmax takes equally long for wide and narrow heads. The last wave of blocks does not
    fill the processors.
    """
    heads, queries, keys, width, _ = sizes
    padded = ceil(queries / _BLOCK) * ceil(keys / _BLOCK) * _BLOCK**2 / (queries * keys)
    begun = 1 + (_KEY_RAMP + (_DIAGONAL if is_causal else 0.0)) / keys
    waves = heads * ceil(queries / _BLOCK) / num_processors
    return padded * begun * (1 + _SOFTMAX / width) * (1 + _LAST_WAVE / waves)


def correction(sizes: tuple[float, ...], *, points: Points) -> float:
    """Return measured / predicted: the mean over points, weighted by 1 / distance² in octaves; 1 far from all."""
    if not points:
        return 1.0
    at = [log2(size) for size in sizes]
    total, weights = 0.0, 1 / _FAR**2
    for place, ratio in points:
        distance = sum((one - other) ** 2 for one, other in zip(at, place, strict=True))
        weight = 1 / (distance + _NEAR**2)
        total += weight * log(ratio)
        weights += weight
    return exp(total / weights)
