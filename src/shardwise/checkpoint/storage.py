"""Our storage for torch.distributed.checkpoint: its planners decide which rank reads or writes which box.

    .saving-step-00000100-4f1c…/        made by rank 0
        rank-00000.safetensors …        each written and synced by its rank
        manifest.json                   written by rank 0 when the files of all ranks are on disk
    step-00000100/                      the same folder, renamed: from here on the checkpoint exists

So a folder with the name of a checkpoint is complete; what a crash leaves has another name.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.disk import Disk
from shardwise.checkpoint.folder import begin, commit, discard, prune, write_file
from shardwise.checkpoint.manifest import (
    Contents,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    box_key,
    box_of,
    read_manifest,
)
from shardwise.checkpoint.tensor_file import TensorEntry, TensorFile, opened
from shardwise.errors import CheckpointError


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint into `folder`, and removes all but the last `keep`.

    contents   this rank's contents that are not tensors
    damaged    the names of checkpoints that do not count among those that are kept
    on_saved   is called on rank 0 when the checkpoint is on disk, before older ones are removed
    """

    def __init__(
        self,
        folder: Path,
        *,
        contents: Contents,
        keep: int | None = None,
        disk: Disk | None = None,
        damaged: Collection[str] = (),
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = folder
        self._contents = contents
        self._keep = keep
        self._disk = disk or Disk()
        self._damaged = damaged
        self._on_saved = on_saved
        self._everyone: list[Contents] = []
        self._saving = Path()
        # The finished checkpoint; known on rank 0.
        self.path: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(f"{item.index.fqn} is no tensor: it could only be written with pickle")
        return replace(plan, storage_data=self._contents)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder. Runs on rank 0, before any rank writes."""
        self._everyone = [plan.storage_data for plan in plans]
        self._saving = begin(self._folder, step=self._contents.step, disk=self._disk)
        return [
            replace(plan, storage_data=self._saving / f"rank-{rank:05}.safetensors") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank; it is on disk when this returns."""
        path: Path = plan.storage_data
        stored = self._write_file(path, plan.items, planner) if plan.items else None
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=item.tensor_storage_size() or 0,
                storage_data=(path.name, stored),
            )
            for item in plan.items
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, path: Path, items: list[WriteItem], planner: SavePlanner) -> StoredFile:
        entries = {}
        for item in items:
            data = item.tensor_data
            assert data is not None
            box = Box(offsets=tuple(data.chunk.offsets), sizes=tuple(data.chunk.sizes))
            key = box_key(item.index.fqn, box, shape=tuple(data.size))
            entries[key] = TensorEntry(dtype=data.properties.dtype, shape=box.sizes)
        tensors = (_on_cpu(planner.resolve_data(item)) for item in items)
        return write_file(path, entries, tensors, disk=self._disk)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder. Runs on rank 0, when the files of all ranks are on disk."""
        files: dict[str, StoredFile] = {}
        where: dict[MetadataIndex, str] = {}
        for result in (result for of_rank in results for result in of_rank):
            name, stored = result.storage_data
            files[name] = stored
            where[result.index] = name
        manifest = Manifest(contents=merged(self._everyone), files=files, tensors=_stored_tensors(metadata, where))
        self.path = commit(self._saving, manifest, disk=self._disk)
        if self._on_saved is not None:
            self._on_saved(self._contents.step)
        if self._keep is not None:
            prune(self._folder, keep=self._keep, newest=self.path, disk=self._disk, damaged=self._damaged)

    def discard(self) -> bool:
        """Remove what a failed save has written, on rank 0; return whether nothing is left."""
        return self._saving == Path() or discard(self._saving, disk=self._disk)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


class CheckpointReader(StorageReader):
    """Reads one checkpoint: `torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))`.

    `state` is {"model": model.state_dict()}, with DTensors, ordinary tensors or boxes.
    """

    def __init__(self, path: str | os.PathLike[str], *, manifest: Manifest | None = None) -> None:
        self._path = Path(path)
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self._path)
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path, self._manifest = Path(checkpoint_id), None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors. Each file is opened once, and whole rows are read straight into place."""
        by_file: dict[str, list[tuple[ReadItem, str, StoredBox]]] = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn} is asked for as an object: only tensors can be loaded")
            name = self.manifest.first_name(item.storage_index.fqn)
            tensor = self.manifest.tensors[name]
            box = box_of(item.storage_index, of=tensor)
            by_file[box.file].append((item, box_key(name, box, shape=tensor.shape), box))
        for name, items in by_file.items():
            with opened(self._path / name) as file:
                for item, key, box in items:
                    target = planner.resolve_tensor(item).detach()
                    _check_box(file, key=key, box=box)
                    file.fill(target, key, offsets=item.storage_offsets)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _on_cpu(data: Any) -> Tensor:
    assert isinstance(data, Tensor)
    return data.detach().cpu()


def _check_box(file: TensorFile, *, key: str, box: Box) -> None:
    entry = file.entries.get(key)
    if entry is None or entry.shape != box.sizes:
        raise CheckpointError(f"{key} is not in {file.path} in its shape: the files are of different checkpoints")


def _stored_tensors(metadata: Metadata, where: dict[MetadataIndex, str]) -> dict[str, StoredTensor]:
    tensors = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = tuple(
            StoredBox(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=where[MetadataIndex(name, chunk.offsets)],
            )
            for chunk in tensor.chunks
        )
        tensors[name] = StoredTensor(dtype=tensor.properties.dtype, shape=tuple(tensor.size), boxes=boxes)
    return tensors


def merged(everyone: list[Contents]) -> Contents:
    """Merge the ranks' contents: each has its own values, and the states of the parameters that it holds."""
    first = everyone[0]
    optimizer = first.optimizer
    if optimizer is not None:
        states = {name: state for contents in everyone for name, state in (contents.optimizer or {})["state"].items()}
        optimizer = {**optimizer, "state": states}
    own = [given for contents in everyone for given in contents.own]
    finite = all(contents.finite for contents in everyone)
    return replace(first, num_ranks=len(everyone), optimizer=optimizer, own=own, finite=finite)
