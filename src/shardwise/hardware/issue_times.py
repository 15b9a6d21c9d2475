"""Measured calls of layers → the CPU's time to issue each operation of a step. No torch, so that any machine has it."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import InvalidData

Rows = Sequence[Mapping[str, Any]]
"""What `calibrate` measured, a row for each kernel and layer."""

IN_A_STEP = 1.45
"""CPU time to issue an operation within a model, relative to a loop over one layer, where caches are warm and there are
no views. Fitted to torch's DDP in benchmarks/results/step_times_h200.json."""

_LAYER_IN_A_STEP, _OTHER_IN_A_STEP = 1.6, 1.3
"""The same on a GPU's host, for operations that are measured as layers and for all others: matrix products and
attention are surrounded by views, chains of elementwise operations have few. Of five pairs, the one closest to the
fitted rows of benchmarks/results/host_probe_h200.json."""

# Views in the layer that has nothing else (measure_host.py).
_NUM_VIEWS = 4
# kind of layer → number of its operations that autograd issues
_BACKWARD_OPS = {"linear": 3, "linear_without_bias": 2}
# operation → the kind of layer whose issue time it has
_ISSUED_AS = {
    "addmm": "linear",
    "mm": "linear_without_bias",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "rms_norm",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_backward": "attention",
    "convolution": "convolution",
    "convolution_backward": "convolution",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm",
}
ISSUED_BY_ITSELF = frozenset(_ISSUED_AS)
"""Operations whose issue time is measured as that of a layer, including its autograd node."""


def launches_of(rows: Rows, *, kernel_seconds: float, is_host: bool) -> dict[str, tuple[float, float]]:
    """Return operation → the CPU's seconds to issue it in forward and in backward.

    "node": per node of the autograd graph, one of which may issue several operations. Views are nodes that issue none;
    the backward of an addition is a node and one operation.

    If the CPU is the device, a kernel's time includes its issue, except what autograd and modules add.
    """
    layers = {row["role"]: row for row in rows if row["name"] == "dispatch"}
    if "add" not in layers:
        raise InvalidData("there is no dispatch among what was measured")
    call = (IN_A_STEP * layers["add"]["forward"], IN_A_STEP * layers["add"]["backward"])
    if is_host:
        return {"call": call, "other": (max(call[0] - kernel_seconds, 0.0), max(call[1] - kernel_seconds, 0.0))}
    issued = {
        op: (
            _LAYER_IN_A_STEP * layers[layer]["forward"],
            _LAYER_IN_A_STEP * layers[layer]["backward"] / _BACKWARD_OPS.get(layer, 1),
        )
        for op, layer in _ISSUED_AS.items()
        if layer in layers
    }
    node = layers["view"]["backward"] / _NUM_VIEWS if "view" in layers else 0.0
    other = (layers["add"]["forward"], max(layers["add"]["backward"] - node, 0.0))
    others = {"node": (0.0, node), "other": other}
    return {"call": call} | issued | {op: (_OTHER_IN_A_STEP * a, _OTHER_IN_A_STEP * b) for op, (a, b) in others.items()}
