"""How long a kernel takes on a device: a law of its sizes, corrected by what was measured nearby. No torch here.

    seconds = kernel_seconds + max(operations / (peak · reach), bytes / (bandwidth · reach)), × a correction

Operations of matrix products and of attention count with what their tiles waste (`product_seconds`,
`attention_excess`; their constants are fitted to benchmarks/results/calibrate_h200.json).
The peaks are the datasheet's; `reach` and the corrections come from a calibration: the device's own or, for a device
that has none, an H200's (borrowed.py).
"""

from dataclasses import dataclass, replace
from math import ceil, exp, log, log2

from shardwise.hardware.calibration import Calibration, Points
from shardwise.hardware.device import Device
from shardwise.hardware.software import software_of

# Rows and columns of the part of a product that one processor computes at a time.
_TILES = tuple((rows, columns) for rows in (64, 128, 192, 256) for columns in (64, 96, 128, 160, 192, 256))
# Of which it holds the sums in its registers.
_MOST_VALUES = 256 * 160
# A tile reads rows + columns values for rows · columns products: at this many products a value it is at half speed.
_HALF_SPEED = 16.0
# (rows, columns, operations for each step of k, as many as if they went at full speed).
_WORK = tuple(
    (rows, columns, 2 * (rows * columns + _HALF_SPEED * (rows + columns)))
    for rows, columns in _TILES
    if rows * columns <= _MOST_VALUES
)
# Where there are more than these, it no longer matters how full the last one is.
_MANY_WAVES = 8
# Beginning and end of a tile, in steps of k.
_RAMP = 100.0
# Of a whole product, before its first tile and after its last.
_START_SECONDS = 2e-6
# Of attention: queries and keys in a block; what a row of blocks loses at its beginning and at its diagonal, in keys;
# the softmax of a score, in products; the last wave, in full ones.
_BLOCK, _KEY_RAMP, _DIAGONAL, _SOFTMAX, _LAST_WAVE = 128, 128.0, 512.0, 64.0, 1.0
# Where rows of 16-bit values begin at multiples of so many, → what that is called; kernels differ. At 8 they are whole
# loads of 16 bytes.
_ALIGNED = {8: "", 4: " aligned to 4", 2: " aligned to 2", 1: " unaligned"}
# Into how many parts k is cut where a product has few rows and columns.
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_SPLIT = 512
# A point that is this far away (in octaves) weighs as much as no correction at all.
_FAR = 2.0
_NEAR = 0.1

# Of attention: beyond so many keys, and so many queries of all heads, it does not get faster.
_LONGEST = 8192.0
_MOST_ROWS = 2.0**18


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel at one size: the name of its probe, and what else tells kernels apart.

    sizes   by which its points are found; of a matrix product (products, m, n, k)
    """

    name: str
    dtype: str
    num_flops: float
    num_bytes: float
    sizes: tuple[float, ...]
    role: str = ""

    @property
    def key(self) -> str:
        """Under which its reach and its points stand."""
        return " ".join(part for part in (self.name, self.role, self.dtype) if part)


BY_COLUMNS = (
    "layer_norm",
    "layer_norm_backward",
    "rms_norm_backward",
    "column_sum",
    "batch_norm",
    "batch_norm_backward",
)
"""Memory-bound kernels whose time depends on how many columns (or channels) their bytes are in."""


def product(dtype: str, sizes: tuple[float, ...], *, role: str, num_bytes: float) -> Kernel:
    """`count` matrix products of (m, n, k). Where rows do not begin at multiples of 16 bytes, other kernels run."""
    count, m, n, k = sizes
    inner = (m, n) if role == "weight" else (n, k)
    if dtype != "fp32":
        role += next(name for values, name in _ALIGNED.items() if not any(size % values for size in inner))
    return Kernel("matmul", dtype, 2 * count * m * n * k, num_bytes, sizes, role=role)


def attention(dtype: str, dims: tuple[float, ...], *, backward: bool, num_flops: float, num_bytes: float) -> Kernel:
    """Fused attention of (heads in the batch, queries, keys, width). Causal if it computes less than all products.

    Its sizes are these, and the bytes of each query: fewer where heads share their keys and values.
    """
    heads, queries, keys, width = dims
    everything = (5 if backward else 2) * 2 * heads * queries * keys * width
    role = "causal" if num_flops < everything else "full"
    name = "attention_backward" if backward else "attention"
    # Longer or more than what fills a device it runs at the same speed, so its points are those of that size.
    rows, columns = min(queries, _LONGEST), min(keys, _LONGEST)
    sizes = (min(heads, _MOST_ROWS / rows), rows, columns, width, num_bytes / (heads * queries))
    return Kernel(name, dtype, num_flops, num_bytes, sizes, role=role)


def strided(name: str, elements: float, *, num_bytes: float) -> Kernel:
    """An elementwise kernel that finds the place of each element by itself: that takes longer than to move it.

    So its time goes with the elements; its size is what is read and written of as many in 16 bits.
    """
    return Kernel("strided_cat" if name == "cat" else "strided", "", 0.0, num_bytes, (max(4 * elements, 1.0), 1.0))


class KernelModel:
    """How long kernels take on one kind of device; `is_own`: the calibration was measured on it."""

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
        """The kernel's time on the device."""
        found = self._seen.get(kernel)
        if found is None:
            computed = self._as_computed(kernel)
            found = self.start_seconds(computed) + self._busy(computed) / relative_reach(self.device, computed)
            if self.is_own:
                found *= correction(computed.sizes, points=self.calibration.points.get(computed.key, ()))
            self._seen[kernel] = found
        return found

    def _as_computed(self, kernel: Kernel) -> Kernel:
        """Where torch may, it multiplies fp32 values as TF32."""
        may = self.device.matmul_precision != "highest" and self.device.tf32_flops_per_s is not None
        if may and kernel.dtype == "fp32" and (kernel.name == "matmul" or kernel.name.startswith("attention")):
            return replace(kernel, dtype="tf32")
        return kernel

    def _busy(self, kernel: Kernel) -> float:
        """Without its start."""
        return self.law(kernel) / self._reach(kernel)

    def start_seconds(self, kernel: Kernel) -> float:
        """What a kernel takes however small it is."""
        return self.calibration.kernel_seconds + (_START_SECONDS if kernel.name == "matmul" and self._tiled else 0.0)

    def law(self, kernel: Kernel) -> float:
        """Seconds at the device's peaks, which no kernel reaches."""
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
        """That of the same kernel in another dtype where its own is not known, and of an addition where none is."""
        reach = self.calibration.reach
        for key in (
            kernel.key,
            f"{kernel.name} {kernel.role.partition(' aligned to')[0]} unaligned {kernel.dtype}",
            f"{kernel.name} {kernel.role} bf16",
            f"{kernel.name} {kernel.dtype}",
            kernel.name,
            "add",
        ):
            if key in reach:
                return reach[key]
        return 1.0

    def peak(self, dtype: str) -> float:
        """fp16's where the device does not know bf16; then fp32's."""
        for name in (dtype, "fp16", "fp32") if dtype in ("bf16", "fp16") else (dtype or "fp32", "fp32"):
            peak = self.device.flops_per_s(name)
            if peak is not None:
                return peak.value
        raise AssertionError(f"{self.device.name} has no peak")


def relative_reach(device: Device, kernel: Kernel) -> float:
    """How fast a kernel is on a device, relative to what the lender's calibration predicts."""
    own, table = None, ""
    if device.calibration is not None:
        # It was measured with the software that runs on it.
        return 1.0
    if kernel.name == "matmul":
        own, table = device.matmul_reach, "matmul_reach"
    elif kernel.name.startswith("attention"):
        own, table = device.attention_reach, "attention_reach"
    elif kernel.name in ("rms_norm", "rms_norm_backward"):
        table = f"{kernel.name}_reach"
    if own is not None:
        return own.value
    software = software_of(device.software)
    found = None
    if kernel.name == "matmul" and kernel.dtype == "fp32":
        found = software.reach("fp32_matmul_reach", architecture=device.architecture)
    if found is None and table:
        found = software.reach(table, architecture=device.architecture)
    return found if found is not None else 1.0


def product_seconds(sizes: tuple[float, ...], *, flops_per_s: float, num_processors: int) -> float:
    """`count` products of m × k with k × n, cut into tiles that the processors compute in waves.

    A last wave with few tiles takes as long as a full one. Of several ways to cut, the library takes the fastest.
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
    """How many times as long as its operations fused attention takes.

    Queries and keys come in blocks. A row of blocks takes a while to begin, and where it is causal the blocks on its
    diagonal are half for nothing. The softmax costs as much for a wide head as for a narrow one. The last wave of
    blocks does not fill the processors.
    """
    heads, queries, keys, width, _ = sizes
    padded = ceil(queries / _BLOCK) * ceil(keys / _BLOCK) * _BLOCK**2 / (queries * keys)
    begun = 1 + (_KEY_RAMP + (_DIAGONAL if is_causal else 0.0)) / keys
    waves = heads * ceil(queries / _BLOCK) / num_processors
    return padded * begun * (1 + _SOFTMAX / width) * (1 + _LAST_WAVE / waves)


def correction(sizes: tuple[float, ...], *, points: Points) -> float:
    """Measured / predicted, as at the points nearby: a mean weighted by 1 / distance², in octaves; 1 far from all."""
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
