"""Shardwise inside other frameworks' training loops. A framework is imported when one of these names is first used.

ShardwiseTrainer, ShardwiseMixin   Hugging Face Transformers' Trainer, and trainers derived from it (TRL's)
ShardwiseAccelerator               Hugging Face Accelerate
ShardwiseStrategy                  Lightning's Trainer
ShardwiseFabricStrategy            Lightning Fabric
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.errors import MissingExtra

if TYPE_CHECKING:
    from shardwise.integrations.fabric_strategy import ShardwiseFabricStrategy
    from shardwise.integrations.hf_accelerator import ShardwiseAccelerator
    from shardwise.integrations.hf_trainer import ShardwiseMixin, ShardwiseTrainer
    from shardwise.integrations.lightning_strategy import ShardwiseStrategy

# Name → its file, the packages that it needs, and the extra that installs them.
_HOME = {
    "ShardwiseAccelerator": ("hf_accelerator", ("accelerate",), "hf"),
    "ShardwiseFabricStrategy": ("fabric_strategy", ("lightning",), "peers"),
    "ShardwiseMixin": ("hf_trainer", ("transformers", "accelerate"), "hf"),
    "ShardwiseStrategy": ("lightning_strategy", ("lightning",), "peers"),
    "ShardwiseTrainer": ("hf_trainer", ("transformers", "accelerate"), "hf"),
}

__all__ = [
    "ShardwiseAccelerator",
    "ShardwiseFabricStrategy",
    "ShardwiseMixin",
    "ShardwiseStrategy",
    "ShardwiseTrainer",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise.integrations' has no attribute {name!r}")
    file, packages, extra = _HOME[name]
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise MissingExtra.of(package, needed_for=f"shardwise.integrations.{name}", extra=extra) from error
    value: object = getattr(import_module(f"shardwise.integrations.{file}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
