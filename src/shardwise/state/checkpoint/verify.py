"""Verify a checkpoint: every file matches its checksum and holds the boxes that the manifest names."""

from shardwise.base.errors import CheckpointError
from shardwise.base.files.object_path import Location
from shardwise.state.checkpoint.manifest import Manifest, box_key, read_manifest, verify_files
from shardwise.state.checkpoint.tensor_file import opened_all


def verify(path: Location) -> Manifest:
    """Return the manifest of a good checkpoint; raise the first problem of a damaged one, in one line."""
    manifest = read_manifest(path)
    verify_files(path, manifest.files)
    with opened_all(path / name for name in manifest.files) as opened:
        files = {file.path.name: file for file in opened}
        for name, tensor in manifest.tensors.items():
            for box in tensor.boxes():
                file = files[box.file]
                entry = file.entries.get(box_key(name, box, shape=tensor.shape))
                if entry is None or entry.shape != box.sizes or entry.dtype != tensor.dtype:
                    raise CheckpointError(f"{name}: the box at {box.offsets} is not in {file.path} as it should be")
    return manifest
