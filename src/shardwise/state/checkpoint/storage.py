"""Our storage for torch.distributed.checkpoint, whose planners decide which boxes a rank reads."""

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.base.errors import CheckpointError
from shardwise.base.files.object_path import ObjectPath, location
from shardwise.state.checkpoint.boxes import Box
from shardwise.state.checkpoint.manifest import Manifest, StoredBox, box_key, box_of, read_manifest
from shardwise.state.checkpoint.tensor_file import TensorFile, opened


class CheckpointReader(StorageReader):
    """Reads one checkpoint: `torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))`.

    `state` is {"model": model.state_dict()}, with DTensors, ordinary tensors or boxes.

    wanted   tensor → the elements of it that this rank reads; see Manifest.metadata
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | ObjectPath,
        *,
        manifest: Manifest | None = None,
        wanted: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._path = location(path)
        self._manifest = manifest
        self._wanted = wanted

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self._path)
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path, self._manifest, self._wanted = location(checkpoint_id), None, None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.manifest.metadata(self._wanted)

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


def _check_box(file: TensorFile, *, key: str, box: Box) -> None:
    entry = file.entries.get(key)
    if entry is None or entry.shape != box.sizes:
        raise CheckpointError(f"{key} is not in {file.path} in its shape: the files are of different checkpoints")
