"""Verify a checkpoint: every file matches its checksum, and boxes in those files cover every tensor."""

from math import prod
from pathlib import Path

from shardwise.checkpoint.manifest import Manifest, box_key, read_manifest, verify_files
from shardwise.checkpoint.tensor_file import TensorFile, opened_all
from shardwise.errors import CheckpointError


def verify(path: Path) -> Manifest:
    """Return the manifest of a good checkpoint; raise the first problem of a damaged one, in one line."""
    manifest = read_manifest(path)
    verify_files(path, manifest.files)
    with opened_all(path / name for name in manifest.files) as files:
        for name in manifest.tensors:
            _verify_tensor(name, manifest=manifest, files={file.path.name: file for file in files})
    return manifest


def _verify_tensor(name: str, *, manifest: Manifest, files: dict[str, TensorFile]) -> None:
    tensor = manifest.tensors[name]
    for box in tensor.boxes:
        entry = files[box.file].entries.get(box_key(name, box, shape=tensor.shape))
        if entry is None or entry.shape != box.sizes or entry.dtype != tensor.dtype:
            raise CheckpointError(f"{name}: the box at {box.offsets} is not in {files[box.file].path} as it should be")
    # torch's planner checked during the save that boxes do not overlap.
    covered = sum(box.num_elements for box in tensor.boxes)
    if covered != prod(tensor.shape):
        raise CheckpointError(f"{name}: its boxes cover {covered} of {prod(tensor.shape)} elements")
