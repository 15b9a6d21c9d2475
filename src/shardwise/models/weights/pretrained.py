"""Weights of Hugging Face models, streamed from their files into slices, and back.

    model = shardwise.from_pretrained(AutoModelForCausalLM, DIR, plan)
    shardwise.save_pretrained(model, DIR)

One tensor (when saving, one unit) is in memory at a time, however large the model is. The names in the files are those
that transformers writes. Models whose tensors have other shapes in files are left to transformers itself.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, InvalidModel, ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.base.vocabulary.tested_versions import warn_if_untested
from shardwise.comm.groups.agreement import meet
from shardwise.engine.owned_model import OwnedModel
from shardwise.engine.prepared.weight_stream import full_parameters
from shardwise.engines import prepare, require_engine
from shardwise.plan import Plan, as_plan
from shardwise.plan.limits import LIMITS
from shardwise.state.checkpoint.tensor_file import TensorEntry, TensorFile, opened, write_tensors
from shardwise.state.checkpoint.weight_files import INDEX, ONE_FILE, divide_weights, write_index

# The default size of Hugging Face's files.
_MOST_FILE_BYTES = 50 * 10**9
_MOST_INDEX_BYTES = 2**28


def from_pretrained(
    model_class_or_config: Any, folder: str | Path, plan: Plan | str, *, device: torch.device | str | None = None
) -> nn.Module:
    """Load the model of a Hugging Face folder, prepared by `plan`, in evaluation mode like transformers'. Collective.

    model_class_or_config   a class (LlamaForCausalLM, AutoModelForCausalLM), or a config that names its architecture
    folder                  config.json with model.safetensors, or several files and their index; every rank sees it

    The model is built without memory for its parameters. Rank 0 reads each tensor once; each rank keeps what it owns,
    with the precision of the file. Weights that are missing in the files are initialised as transformers does, with a
    warning.
    """
    warn_if_untested("transformers")
    plan = as_plan(plan)
    LIMITS[plan.engine].check_call("from_pretrained", plan)
    model = empty_model(model_class_or_config, Path(folder), native=plan.precision == "native")
    with SafetensorsFolder(Path(folder), stored=stored_names(model, model.state_dict())) as weights:
        warn_of_differences(model, weights, folder=Path(folder))
        prepared, _ = prepare(model, None, plan, device=device, weights=weights)
    return prepared.eval()


def save_pretrained(model: nn.Module, folder: str | Path, *, most_file_bytes: int = _MOST_FILE_BYTES) -> None:
    """Write a prepared model for `from_pretrained` of transformers, and ours. Collective.

    Weights are the optimizer's, unit by unit, in one file or in several with an index, next to the config and the
    generation config. Each file appears complete or not at all, the index last.
    """
    engine = require_engine(model)
    LIMITS[engine.plan.engine].check_call("save_pretrained", engine.plan)
    meet("shardwise.save_pretrained")
    held = engine.held()
    stored = stored_names(model, [*held.parameters, *held.aliases, *held.buffers])
    entries = _entries(model, held)
    parts = divide_weights(entries, most_file_bytes=most_file_bytes)
    failure: str | None = None
    values = _values(model, held, wanted=entries)
    if dist.get_rank() == 0:
        try:
            _write(model, Path(folder), parts=parts, entries=entries, values=values, stored=stored)
        except (OSError, ShardwiseError) as error:
            failure = str(error)
    for _ in values:
        # The other ranks take part in the gathers; after a failure rank 0 does so too.
        pass
    box = [failure]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise InvalidData(f"the model was not saved in {folder}: {box[0]}")


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder by the model's names; each is read when it is asked for, and not kept.

    stored   the model's name → the name in the files
    """

    def __init__(self, folder: Path, *, stored: Mapping[str, str]) -> None:
        self._stack = ExitStack()
        found: dict[str, TensorFile] = {}
        for path in _files_in(folder):
            file = self._stack.enter_context(opened(path))
            found |= dict.fromkeys(file.entries, file)
        # Files may have been written under the model's own names.
        own = {name: stored.get(name, name) for name in (*stored, *found)}
        taken = {theirs for name, theirs in own.items() if name != theirs and theirs in found}
        self._places = {
            name: (found[theirs], theirs)
            for name, theirs in own.items()
            if theirs in found and (name != theirs or name not in taken)
        }

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        file, theirs = self._places[name]
        return file.read(theirs)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _files_in(folder: Path) -> list[Path]:
    if (folder / ONE_FILE).exists():
        return [folder / ONE_FILE]
    try:
        index = read_json(folder / INDEX, most_bytes=_MOST_INDEX_BYTES)
        names = sorted({str(name) for name in index["weight_map"].values()})
    except UnreadableFile as error:
        if error.is_missing:
            raise InvalidData(f"{folder} has neither {ONE_FILE} nor {INDEX}") from error
        raise InvalidData(f"{folder / INDEX} {error}") from error
    except (KeyError, AttributeError, TypeError) as error:
        raise InvalidData(f"{folder / INDEX} is malformed ({error})") from error
    if any(Path(name).name != name for name in names):
        raise InvalidData(f"{folder / INDEX} names files outside of its folder")
    return [folder / name for name in names]


def empty_model(asked: Any, folder: Path, *, native: bool) -> Any:
    """Build a model with parameters on the meta device; buffers are real, since many are computed and not saved."""
    import transformers
    from accelerate import init_empty_weights

    if isinstance(asked, transformers.PretrainedConfig):
        names = getattr(asked, "architectures", None) or []
        if len(names) != 1 or not hasattr(transformers, names[0]):
            raise InvalidModel(f"this {type(asked).__name__} names no single architecture: give the model's class")
        config, model_class = asked, getattr(transformers, names[0])
    else:
        config_class = getattr(asked, "config_class", None) or transformers.AutoConfig
        config, model_class = config_class.from_pretrained(folder), asked
    make = getattr(model_class, "from_config", None) or model_class._from_config
    # fp32 keeps the precision of the file; the plan sets the dtype in which units compute.
    options = {} if native else {"dtype": torch.float32}
    with init_empty_weights(include_buffers=False):
        model = make(config, **options)
    model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def stored_names(model: nn.Module, own: Iterable[str]) -> dict[str, str]:
    """Return the model's `own` names of its tensors → their names in files, as transformers writes them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    if not all(isinstance(step, WeightRenaming) for step in get_model_conversion_mapping(model, add_legacy=False)):
        raise InvalidModel(
            f"{type(model).__name__} has other tensors in its files than in the model, which transformers converts: "
            "use its own from_pretrained and save_pretrained, with shardwise.prepare in between"
        )
    marks = {name: torch.empty(0, device="meta") for name in own}
    names = {id(mark): name for name, mark in revert_weight_conversion(model, dict(marks)).items()}
    return {name: names[id(mark)] for name, mark in marks.items()}


def warn_of_differences(model: nn.Module, weights: SafetensorsFolder, *, folder: Path) -> None:
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    missing = [found[0] for found in names.values() if not any(name in weights for name in found)]
    known = {name for found in names.values() for name in found}
    extra = [name for name in weights if name not in known]
    if len(missing) == len(names):
        raise InvalidData(f"{folder} holds other names than {type(model).__name__}: {', '.join(list(weights)[:3])} …")
    if (missing or extra) and (not dist.is_initialized() or dist.get_rank() == 0):
        parts = [f"{len(found)} {what} ({', '.join(found[:3])})" for found, what in (
            (missing, "initialised, not in the files"), (extra, "in the files alone")) if found]  # fmt: skip
        warnings.warn(f"{folder} and {type(model).__name__} differ: {'; '.join(parts)}", stacklevel=3)


def _entries(model: nn.Module, held: OwnedModel) -> dict[str, TensorEntry]:
    """List the tensors to save, in the order of `_values`. A tied parameter is saved once, under its first name."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    entries = {name: TensorEntry(dtype=dtype, shape=tuple(shape)) for name, (shape, dtype) in held.parameters.items()}
    entries |= {name: TensorEntry(dtype=value.dtype, shape=tuple(value.shape)) for name, value in held.buffers.items()}
    return {name: entry for name, entry in entries.items() if name not in left_out}


def _values(model: nn.Module, held: OwnedModel, *, wanted: Collection[str]) -> Iterator[Tensor]:
    """Yield the wanted parameters and buffers, on rank 0 on the CPU; each unit is gathered once. Collective."""
    on_cpu = dist.get_rank() == 0
    for name, tensor in full_parameters(model):
        value = tensor.cpu() if on_cpu and name in wanted else tensor
        # On a GPU, a view would keep the buffer of its unit while the next unit is gathered.
        del tensor
        if name in wanted:
            yield value
    yield from (value.cpu() for name, value in held.buffers.items() if name in wanted)


def _write(
    model: Any,
    folder: Path,
    *,
    parts: Mapping[str, list[str]],
    entries: Mapping[str, TensorEntry],
    values: Iterator[Tensor],
    stored: Mapping[str, str],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, names in parts.items():
        with atomic_write(folder / file_name) as file:
            inside = {stored[name]: entries[name] for name in names}
            write_tensors(file, inside, islice(values, len(names)), metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = str(next(iter(entries.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if len(parts) > 1:
        weight_map = {stored[name]: file_name for file_name, names in parts.items() for name in names}
        write_index(folder, weight_map=weight_map, num_bytes=sum(entry.num_bytes for entry in entries.values()))
    else:
        (folder / INDEX).unlink(missing_ok=True)
    # Files of an earlier save into another number of files.
    for stale in (folder / ONE_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        if stale.name not in parts:
            stale.unlink(missing_ok=True)
