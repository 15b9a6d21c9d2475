"""Models of the transformers library, by a shape of the catalogue or a folder's config.json; weights are not read."""

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.base.errors import InvalidModel, MissingExtra
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.models.shapes import TransformersShape


def imported(package: str, *, needed_for: str, extra: str | None = "hf") -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra.of(package, needed_for=needed_for, extra=extra) from error


def model_of_shape(shape: TransformersShape) -> nn.Module:
    transformers = imported("transformers", needed_for=f"a {shape.model_type} model")
    return model_of_config(transformers.AutoConfig.for_model(shape.model_type, **shape.config))


def config_of_folder(folder: str | Path) -> Any:
    """Return the config of a folder; a mistake in it is one line."""
    transformers = imported("transformers", needed_for="hf:")
    try:
        # It may hold Infinity, as Mamba's does.
        read_json(Path(folder, "config.json"), finite=False)
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError, UnreadableFile) as error:
        raise InvalidModel(f"hf:{folder}: {' '.join(str(error).split())[:300]}") from error


def model_of_config(config: Any) -> nn.Module:
    """Build the language model of a config, on torch's default device: the masked one of an encoder, else the causal.

    Attention is torch's, and there is no cache of keys and values, which training never reads.
    """
    model_class = class_of_config(config)
    try:
        model: Any = model_class.from_config(config, attn_implementation="sdpa")
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise InvalidModel(f"{config.model_type}: {' '.join(str(error).split())[:300]}") from error
    model.config.use_cache = False
    model.train()
    found: nn.Module = model
    return found


def class_of_config(config: Any) -> Any:
    transformers = imported("transformers", needed_for="hf:")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    named = (getattr(config, "architectures", None) or [""])[0]
    if named.endswith("ForMaskedLM") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM
