"""Shardwise inside other frameworks' training loops. A framework is imported when one of these names is first used.

ShardwiseTrainer, ShardwiseMixin   Hugging Face Transformers' Trainer, and trainers derived from it (TRL's)
ShardwiseAccelerator               Hugging Face Accelerate
ShardwiseStrategy                  Lightning's Trainer
ShardwiseFabricStrategy            Lightning Fabric
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.base.errors import MissingExtra
from shardwise.base.vocabulary.lazy_names import lazy_names

if TYPE_CHECKING:
    from shardwise.doors.integrations.fabric_strategy import ShardwiseFabricStrategy as ShardwiseFabricStrategy
    from shardwise.doors.integrations.hf_accelerator import ShardwiseAccelerator as ShardwiseAccelerator
    from shardwise.doors.integrations.hf_trainer import ShardwiseMixin as ShardwiseMixin
    from shardwise.doors.integrations.hf_trainer import ShardwiseTrainer as ShardwiseTrainer
    from shardwise.doors.integrations.lightning_strategy import ShardwiseStrategy as ShardwiseStrategy

# File → the extra that installs the packages that it needs, and those packages.
_NEEDS = {
    "fabric_strategy": ("lightning", "lightning"),
    "hf_accelerator": ("accelerate", "accelerate"),
    "hf_trainer": ("hf", "transformers", "accelerate"),
    "lightning_strategy": ("lightning", "lightning"),
}


def __getattr__(name: str) -> object:
    homes = lazy_names(__file__)
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module 'shardwise.integrations' has no attribute {name!r}")
    extra, *packages = _NEEDS[homes[name].rpartition(".")[2]]
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise MissingExtra.of(package, needed_for=f"shardwise.integrations.{name}", extra=extra) from error
    value: object = getattr(import_module(homes[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *lazy_names(__file__)})
