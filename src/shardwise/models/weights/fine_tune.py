"""A checkpoint folder of transformers as a task of `shardwise train`, whole or with LoRA adapters of PEFT.

The model is built without memory. Its weights are read from the files tensor by tensor when it is prepared, and
adapters start as in PEFT: A uniform (Kaiming), B zero. Under adapters the base can be in NF4 (quantised.py).
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.base.files.atomic import atomic_write
from shardwise.engine.prepared.weight_stream import full_parameters
from shardwise.models.catalogue import default_seq
from shardwise.models.hub_cache import config_folder
from shardwise.models.specs.spec_request import Adaptation
from shardwise.models.tasks import Task
from shardwise.models.tasks.transformers_task import task_of_model, with_data
from shardwise.models.transformers_model import class_of_config, config_of_folder, imported
from shardwise.models.weights.pretrained import (
    SafetensorsFolder,
    empty_model,
    save_pretrained,
    stored_names,
    warn_of_differences,
)
from shardwise.models.weights.quantised import QuantisedWeights, quantise
from shardwise.state.checkpoint.tensor_file import TensorEntry, write_tensors

_PREFIX = "base_model.model."
_TOKENIZER = "tokenizer.json"


def checkpoint_task(
    name: str,
    *,
    dataset: str | None,
    seq: int | None,
    tokenizer: str | None = None,
    adaptation: Adaptation | None = None,
    native: bool = False,
    device: torch.device | str = "cpu",
) -> Task:
    """Return the task of a folder with config.json and safetensors files.

    `native`: in the dtypes of the files. `device` quantises them, if the adaptation asks for that.
    """
    folder = Path(config_folder(name))
    config = config_of_folder(folder)
    model = empty_model(class_of_config(config), folder, native=native)
    model.config.use_cache = False
    stored = stored_names(model, model.state_dict())
    files = SafetensorsFolder(folder, stored=stored)
    warn_of_differences(model, files, folder=folder)
    weights: Mapping[str, Tensor] = files
    if adaptation is not None:
        model, weights = _with_adapters(model, adaptation, folder=folder, stored=stored, files=files, device=device)
    model.train()
    length = seq or default_seq(getattr(config, "max_position_embeddings", None))
    own = folder / _TOKENIZER
    return replace(
        with_data(
            task_of_model(model, seq=length),
            dataset,
            seq=length,
            vocab_size=config.get_text_config().vocab_size,
            tokenizer=Path(tokenizer) if tokenizer is not None else own if own.is_file() else None,
        ),
        weights=weights,
    )


def _with_adapters(
    model: nn.Module,
    adaptation: Adaptation,
    *,
    folder: Path,
    stored: Mapping[str, str],
    files: Mapping[str, Tensor],
    device: torch.device | str,
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Return the model with adapters, and the weights by its names."""
    packers = quantise(model, device=device, weights=files) if adaptation.quantize else {}
    model = _adapted(model, adaptation, folder=folder)
    shapes = {path: tuple(value.shape) for path, value in model.named_parameters() if ".lora_" in path}
    # A packed layer has scales in its state dict too, which no file has.
    own = {path: name for path in model.state_dict() if (name := _base_name(path)) in stored}
    weights = AdaptedFolder(folder, stored={path: stored[name] for path, name in own.items()}, shapes=shapes)
    if not packers:
        return model, weights
    by_path = {path: packers[name] for path, name in own.items() if name in packers}
    return model, QuantisedWeights(weights, packers=by_path)


def _adapted(model: nn.Module, adaptation: Adaptation, *, folder: Path) -> Any:
    peft = imported("peft", needed_for="task.lora")
    options = peft.LoraConfig(
        r=adaptation.rank,
        lora_alpha=adaptation.alpha or 2 * adaptation.rank,
        target_modules=list(adaptation.targets) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder),
    )
    try:
        return peft.get_peft_model(model, options, low_cpu_mem_usage=True)
    except ValueError as error:
        raise InvalidModel(f"task.lora_targets: {' '.join(str(error).split())[:300]}") from error


def _base_name(path: str) -> str:
    """Return the name that a parameter of PEFT's wrapper has in the model inside."""
    return path.removeprefix(_PREFIX).replace(".base_layer.", ".")


class AdaptedFolder(SafetensorsFolder):
    """The tensors of a folder, and the first values of adapters, by the names of PEFT's wrapper."""

    def __init__(self, folder: Path, *, stored: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(folder, stored=stored)
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._shapes:
            return super().__getitem__(name)
        value = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._shapes
        yield from super().__iter__()

    def __len__(self) -> int:
        return len(self._shapes) + super().__len__()


def save_fine_tuned(model: nn.Module, folder: Path, *, base: str) -> None:
    """Write the model, or its adapters, for `from_pretrained`, next to the tokenizer of `base`. Collective."""
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        config: Any = model.config
        config.use_cache = config_of_folder(config_folder(base)).use_cache
        save_pretrained(model, folder)
    else:
        _save_adapters(model, folder, options=adapters["default"])
    if dist.get_rank() == 0:
        for path in Path(config_folder(base)).glob("*token*.json"):
            shutil.copyfile(path, folder / path.name)


def _save_adapters(model: nn.Module, folder: Path, *, options: Any) -> None:
    found = {
        # As PEFT writes them: without the name of the adapter.
        name.replace(".default.", "."): value.detach().cpu().clone()
        for name, value in full_parameters(model)
        if ".lora_" in name
    }
    box: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            entries = {name: TensorEntry(dtype=value.dtype, shape=tuple(value.shape)) for name, value in found.items()}
            with atomic_write(folder / "adapter_model.safetensors") as file:
                write_tensors(file, entries, iter(found.values()), metadata={"format": "pt"})
            options.save_pretrained(folder)
        except OSError as error:
            box = [str(error)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise InvalidData(f"the adapters were not saved in {folder}: {box[0]}")
