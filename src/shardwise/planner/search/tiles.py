"""Tiles for long sequences: which modules of a model could compute in them, and in tiles of how many tokens."""

from collections import defaultdict

from shardwise.base.vocabulary.heads import HEADS
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.program.spec import ROOT, ModelSpec

# Names of modules that act on each token by itself, in the models of this package and of others.
_NAMES = ("feed_forward", "mlp", "ffn")
# A dense one has an input layer, perhaps a gate, and an output layer; experts may depend on other tokens.
_NUM_LAYERS = (2, 3)
# Below this, activations of a tile are no longer small next to what backward needs of a unit anyway.
_LEAST_SEQ = 32768
# So many tiles are traced quickly, and their kernels fill a device.
_NUM_TILES, _LEAST_TOKENS = 8, 8192
# The memory of a tile's logits in fp32, unless there were too many tiles to trace.
_LOGIT_BYTES, _MOST_TILES = 2**30, 64


def tiles_of(spec: ModelSpec, *, plan: Plan) -> dict[str, int]:
    """Return the tiles that `auto` may try; none if the plan has decided, or where they would gain little."""
    if plan.tile or not LIMITS[plan.engine].runs("tile") or spec.seq is None or spec.seq < _LEAST_SEQ:
        return {}
    tokens = max(-(-spec.seq // _NUM_TILES), _LEAST_TOKENS)
    layers = _layers(spec)
    modules = {f"*.{name}": tokens for name in _NAMES if len(layers[name]) in _NUM_LAYERS}
    return modules | _head(spec, seq=spec.seq)


def _head(spec: ModelSpec, *, seq: int) -> dict[str, int]:
    """Return the tile of the head, and of the loss after it."""
    for param in (param for unit in spec.units if unit.name == ROOT or unit.from_root for param in unit.params):
        for path in (param.name, *param.aliases):
            module, _, own = path.rpartition(".")
            if own == "weight" and module.rpartition(".")[2] in HEADS:
                tokens = max(_LOGIT_BYTES // (4 * param.shape[0]), -(-seq // _MOST_TILES))
                return {module: 1 << (tokens.bit_length() - 1)} if tokens < seq else {}
    return {}


def _layers(spec: ModelSpec) -> dict[str, set[str]]:
    """Return the names of the layers with parameters inside of the modules of each name, in any unit."""
    found: dict[str, set[str]] = defaultdict(set)
    for unit in spec.units:
        for param in unit.params if unit.name != ROOT else ():
            path = param.name.split(".")
            for name in _NAMES:
                if name in path[:-1]:
                    found[name].add(path[path.index(name) + 1])
    return found
