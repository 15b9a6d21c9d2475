"""Export the weights of a checkpoint to ordinary safetensors files, and import a checkpoint from such files.

Both stream: one tensor is in memory at a time, however large the model is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.object_path import Location
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.folder import begin, commit, write_file
from shardwise.state.checkpoint.hugging_face import HuggingFaceLayout, layout_of_ours, layout_of_theirs
from shardwise.state.checkpoint.manifest import MODEL, Contents, Manifest, StoredBox, StoredTensor, box_key
from shardwise.state.checkpoint.tensor_file import TensorEntry, TensorFile, opened_all, write_tensors
from shardwise.state.checkpoint.typed import dtype_name
from shardwise.state.checkpoint.verify import verify
from shardwise.state.checkpoint.weight_files import INDEX, divide_weights, write_index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """A tensor of the checkpoint, called `name` there, as it is in the files."""

    name: str
    entry: TensorEntry
    transposed: bool


def export_weights(
    path: Location,
    out: Path,
    *,
    hugging_face: bool = False,
    dtype: torch.dtype | None = None,
    most_file_bytes: int | None = None,
) -> list[Path]:
    """Write the parameters and buffers of a checkpoint, under their full names; return the files.

    out               FILE.safetensors, or a folder for model.safetensors, or for several files and an index if one
                      would be larger than `most_file_bytes`
    hugging_face      use the names and shapes of Hugging Face's Llama or GPT-2
    dtype             dtype of floating-point tensors (default: as saved)

    A tied parameter is written under each of its names, so that the module itself loads the file; with `hugging_face`
    once, as Hugging Face does.
    """
    manifest = verify(path)
    tensors = _exported(manifest, hugging_face=hugging_face, dtype=dtype)
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    if out.suffix == ".safetensors":
        folder, files = out.parent, {out.name: list(tensors)}
    else:
        folder, files = out, divide_weights(entries, most_file_bytes=most_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    tied = {} if hugging_face else manifest.contents.aliases
    for file, names in files.items():
        _write(folder / file, {name: tensors[name] for name in names}, tied=tied, path=path, manifest=manifest)
    written = [folder / file for file in files]
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_index(folder, weight_map=weight_map, num_bytes=sum(entry.num_bytes for entry in entries.values()))
        written.append(folder / INDEX)
    return written


def _exported(manifest: Manifest, *, hugging_face: bool, dtype: torch.dtype | None) -> dict[str, _Exported]:
    """Return the tensors to write by their names in the files."""
    names = [*manifest.contents.parameters, *manifest.contents.buffers]
    layout = layout_of_ours(names) if hugging_face else None
    exported = {}
    for name in names:
        if MODEL + name not in manifest.tensors:
            raise CheckpointError(f"the manifest lists {name!r}, and no tensor of it")
        stored = manifest.tensors[MODEL + name]
        transposed = layout is not None and layout.is_transposed(name)
        entry = TensorEntry(
            dtype=dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype,
            shape=stored.shape[::-1] if transposed else stored.shape,
        )
        theirs = layout.theirs(name) if layout is not None else name
        assert theirs is not None
        exported[theirs] = _Exported(name=MODEL + name, entry=entry, transposed=transposed)
    if not hugging_face:
        exported |= {alias: exported[name] for alias, name in manifest.contents.aliases.items()}
    return exported


def _write(
    out: Path, tensors: Mapping[str, _Exported], *, tied: Mapping[str, str], path: Location, manifest: Manifest
) -> None:
    def whole() -> Iterator[Tensor]:
        for tensor in tensors.values():
            value = assembled(tensor.name, manifest=manifest, files=files).to(tensor.entry.dtype)
            yield value.t().contiguous() if tensor.transposed else value

    entries = {name: tensor.entry for name, tensor in tensors.items()}
    try:
        with opened_all(path / name for name in manifest.files) as files, atomic_write(out) as file:
            write_tensors(file, entries, whole(), metadata={"format": "pt", **tied})
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror})") from error


def assembled(name: str, *, manifest: Manifest, files: Iterable[TensorFile]) -> Tensor:
    """Read one whole tensor from its boxes."""
    stored = manifest.tensors[name]
    by_name = {file.path.name: file for file in files}
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for box in stored.boxes():
        target = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        by_name[box.file].fill(target, box_key(name, box, shape=stored.shape), offsets=(0,) * len(box.sizes))
    return whole


def import_weights(
    sources: Iterable[Path], folder: Location, *, hugging_face: bool = False, disk: Disk | None = None
) -> Location:
    """Make a checkpoint of weights alone, at step 0, from safetensors files; return its path in `folder`."""
    disk = disk or Disk()
    with opened_all(sources) as files:
        found = _imported(files, hugging_face=hugging_face)
        ties = {"head.weight": "embed.weight"} if hugging_face else {}
        for file in files:
            ties |= file.metadata
        aliases = _untie(found, ties=ties)
        saving = begin(folder, step=0, disk=disk)
        file_name = "rank-00000.safetensors"
        entries = {MODEL + name: tensor.entry for name, tensor in found.items()}
        stored = write_file(saving / file_name, entries, (tensor.read() for tensor in found.values()), disk=disk)
    parameters = {name: [list(tensor.entry.shape), dtype_name(tensor.entry.dtype)] for name, tensor in found.items()}
    tensors = {
        name: StoredTensor(
            dtype=entry.dtype,
            shape=entry.shape,
            listed=(StoredBox(offsets=(0,) * len(entry.shape), sizes=entry.shape, file=file_name),),
        )
        for name, entry in entries.items()
    }
    contents = Contents(step=0, parameters=parameters, aliases=aliases)
    return commit(saving, Manifest(contents=contents, files={file_name: stored}, tensors=tensors), disk=disk)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Imported:
    """A tensor of a file, as it will be in the checkpoint."""

    file: TensorFile
    name: str
    entry: TensorEntry
    transposed: bool

    def read(self) -> Tensor:
        value = self.file.read(self.name)
        return value.t().contiguous() if self.transposed else value


def _imported(files: Iterable[TensorFile], *, hugging_face: bool) -> dict[str, _Imported]:
    """Return the tensors of the files by our names."""
    files = list(files)
    layout = layout_of_theirs(name for file in files for name in file.entries) if hugging_face else None
    found: dict[str, _Imported] = {}
    for file in files:
        for name, entry in file.entries.items():
            ours = _our_name(name, layout=layout)
            if ours is None:
                continue
            if ours in found:
                raise CheckpointError(f"{ours} is in {found[ours].file.path} and in {file.path}")
            transposed = layout is not None and layout.is_transposed(ours)
            shape = entry.shape[::-1] if transposed else entry.shape
            new = TensorEntry(dtype=entry.dtype, shape=shape)
            found[ours] = _Imported(file=file, name=name, entry=new, transposed=transposed)
    if not any(prod(tensor.entry.shape) for tensor in found.values()):
        raise CheckpointError("there is no tensor in these files")
    return found


def _untie(found: dict[str, _Imported], *, ties: Mapping[str, str]) -> dict[str, str]:
    """Drop tied weights that the files hold a second time; return them as other names of the first."""
    aliases = {}
    for name, first in ties.items():
        one, other = found.get(name), found.get(first)
        if one is None or other is None or one.entry != other.entry or not torch.equal(one.read(), other.read()):
            continue
        del found[name]
        aliases[name] = first
    return aliases


def _our_name(name: str, *, layout: HuggingFaceLayout | None) -> str | None:
    if layout is None:
        return name
    return None if layout.is_derived(name) else layout.ours(name)
