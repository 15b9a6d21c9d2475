"""The safetensors files of a Hugging Face folder: model.safetensors, or several files and their index."""

import json
from collections.abc import Mapping
from pathlib import Path

from shardwise.base.files.atomic import atomic_write
from shardwise.state.checkpoint.tensor_file import TensorEntry

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def divide_weights(entries: Mapping[str, TensorEntry], *, most_file_bytes: int | None) -> dict[str, list[str]]:
    """Return file → its tensors: consecutive ones together, up to the limit. A larger tensor has its own file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if most_file_bytes is not None and parts[-1] and size + entry.num_bytes > most_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += entry.num_bytes
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def write_index(folder: Path, *, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of several files. `weight_map`: name of a tensor → its file."""
    with atomic_write(folder / INDEX) as file:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        file.write(json.dumps(index, indent=2).encode())
