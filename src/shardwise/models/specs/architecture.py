"""Specs of Hugging Face configs by laws of their architecture, without torch and without transformers.

A model of one architecture has the same operations and allocations at any width, depth and vocabulary: only numbers
differ, and each is a polynomial of the sizes in its config.json. `ship_architectures.py` traces several widths of each
architecture, fits the polynomials, and stores them in architectures/:

    fixed    key of the config → values with which the laws hold
    is_large whether the embedding and the head are units of their own, which depends on their size; null: tied
    sizes    a letter → key of the config
    spec     as program/spec/store.py writes it; a size is {"=": "2hf+4gd"}, the last block {last}, laws are polynomials

A config with any other key that could matter, or with another version of transformers installed, is traced instead.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from shardwise.base.files.data_file import UnreadableFile, parse_json, read_json
from shardwise.models.catalogue import default_seq, kind_of
from shardwise.models.hub_cache import config_folder
from shardwise.models.specs.spec_request import SpecRequest
from shardwise.program.spec.model import LARGE_ROOT_LAYER, ModelSpec
from shardwise.program.spec.store import decode

FOLDER = Path(__file__).parent / "architectures"
SIZES = {
    "h": "hidden_size",
    "f": "intermediate_size",
    "a": "num_attention_heads",
    "g": "num_key_value_heads",
    "d": "head_dim",
    "v": "vocab_size",
    "l": "num_hidden_layers",
}
FEWEST_BLOCKS = 8
"""The laws come from models in which runs of equal blocks were cut, which shorter ones need not be."""
LENGTH_STEP = 128
"""Laws hold for lengths that are a multiple of this: kernels round others up."""
# Of no influence on operations and sizes, whatever their value. Rotary scalings that compute more are not in _ROTARY.
_IGNORED = (
    *("_name_or_path", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "rms_norm_eps", "norm_eps", "rope_theta"),
    *("max_position_embeddings", "original_max_position_embeddings", "max_window_layers", "pretraining_tp"),
)
_TRACED_DTYPE = "bfloat16"
_ROTARY = (None, "default", "linear", "llama3", "yarn")
_TERM = re.compile(r"([+-]?\d+)(?:/(\d+))?([a-z]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`laws`: the stored file, of weights in bf16; `dtype`: of these weights; `seq`: tokens per sample."""

    laws: Mapping[str, Any]
    sizes: Mapping[str, int]
    seq: int
    dtype: str

    def spec(self, *, name: str, ways: Collection[tuple[str, str]]) -> ModelSpec:
        """Return the spec with the traces of `ways` that there are laws for."""
        text = json.dumps(self.laws["spec"]).replace("{last}", str(self.sizes["l"] - 1))
        text = re.sub(r"x\{(.*?)\}", lambda found: f"x{value_of(found[1], self.sizes)}", text)
        data = _filled(parse_json(text), self.sizes)
        if self.dtype != _TRACED_DTYPE:
            _in_fp32(data["units"])
        return decode({**data, "name": name, "seq": self.seq}, ways=ways)


def architecture_for(request: SpecRequest) -> Architecture | None:
    """Return the architecture by whose laws a model needs no trace, if there is one."""
    if request.kind != "hf" or not request.is_plain or request.image is not None:
        return None
    return architecture_of(config_folder(kind_of(request.reference)[1]), seq=request.seq)


def architecture_of(folder: str | Path, *, seq: int | None) -> Architecture | None:
    """Return the architecture of a folder's config.json, if its laws are known and hold for samples of this length."""
    try:
        config = read_json(Path(folder) / "config.json")
    except UnreadableFile:
        return None
    if not isinstance(config, dict):
        return None
    seq = default_seq(config.get("max_position_embeddings")) if seq is None else seq
    if seq < 1 or seq % LENGTH_STEP:
        return None
    for laws in _stored(str(config.get("model_type"))):
        sizes = _sizes_of(config, laws=laws)
        if sizes is not None and _installed() in ("", laws["transformers"]):
            return Architecture(laws=laws, sizes=sizes, seq=seq, dtype=_dtype_of(config))
    return None


def value_of(polynomial: str, sizes: Mapping[str, int]) -> int:
    total = sum(
        Fraction(int(factor), int(divisor or 1)) * prod(sizes[letter] for letter in letters)
        for factor, divisor, letters in _TERM.findall(polynomial)
    )
    return int(total)


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype of the weights; without one in its config, transformers makes a model in fp32."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _in_fp32(units: Collection[dict[str, Any]]) -> None:
    """Make parameters fp32, which is what a stored tensor without a dtype is. Steps compute in bf16 all the same."""
    for unit in units:
        for _, _, facts in (tensor for tensor in unit.get("params", ()) if len(tensor) == 3):
            if facts.get("dtype") == _TRACED_DTYPE:
                del facts["dtype"]


@cache
def _stored(model_type: str) -> tuple[dict[str, Any], ...]:
    if not re.fullmatch(r"\w+", model_type):
        return ()
    return tuple(read_json(path) for path in sorted(FOLDER.glob(f"{model_type}-*.json")))


@cache
def _installed() -> str:
    """Return the installed version of transformers without its last number, or "" without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return short_version(version("transformers"))
    except PackageNotFoundError:
        return ""


def short_version(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _sizes_of(config: Mapping[str, Any], *, laws: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the sizes of a config for which laws hold, or None."""
    fixed = laws["fixed"]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rotary.get("rope_type") or rotary.get("type")) not in _ROTARY or rotary.get(
        "partial_rotary_factor", 1.0
    ) != 1.0:
        return None
    if _dtype_of(config) not in (_TRACED_DTYPE, "float32"):
        return None
    layers = config.get("layer_types")
    if layers is not None and layers != ["full_attention"] * (config.get("num_hidden_layers") or 0):
        return None
    known = {*_IGNORED, *SIZES.values(), *fixed, "rope_parameters", "rope_scaling", "layer_types"}
    if set(config) - known or any(config.get(key, values[0]) not in values for key, values in fixed.items()):
        return None
    given = {letter: config.get(key) for letter, key in SIZES.items()}
    if given["d"] is None and laws["has_default_head_dim"]:
        given["d"] = (given["h"] or 0) // (given["a"] or 1)
    given["g"] = given["g"] or given["a"]
    sizes = {letter: size for letter, size in given.items() if isinstance(size, int) and size > 0}
    if len(sizes) == len(SIZES) and laws["is_large"] not in (None, sizes["v"] * sizes["h"] >= LARGE_ROOT_LAYER):
        return None
    if len(sizes) < len(SIZES) or sizes["a"] % sizes["g"] or (sizes["a"] > sizes["g"]) is not laws["is_grouped"]:
        return None
    return sizes if sizes["l"] >= FEWEST_BLOCKS and sizes["d"] in laws["head_dims"] else None


def _filled(data: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(data, dict):
        return value_of(data["="], sizes) if "=" in data else {key: _filled(item, sizes) for key, item in data.items()}
    return [_filled(item, sizes) for item in data] if isinstance(data, list) else data
