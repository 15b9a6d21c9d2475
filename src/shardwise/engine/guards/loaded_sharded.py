"""Refuses models that transformers has distributed while it loaded them.

Without it the error speaks of DTensors, which the user has not written, or of the Trainer's other options. Since
e783b2e3 (models of transformers 5).
"""

from torch import nn

from shardwise.errors import InvalidModel

# Of a DistributedConfig: those that distribute a model, where they are more than 1.
_SIZES = ("fsdp_size", "tp_size", "pp_size", "ep_size")


def refuse_loaded_sharded(model: nn.Module) -> None:
    """Refuse a model of `from_pretrained(…, distributed_config=…)`, or `tp_plan=…`, which becomes such a config."""
    for module in model.modules():
        if getattr(module, "_is_distributed_loading_by_transformers", False):
            config = getattr(getattr(module, "config", None), "distributed_config", None)
            sizes = {name: getattr(config, name, None) or 1 for name in _SIZES}
            said = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)
            raise InvalidModel(
                f"transformers has distributed this model as it loaded it ({said}): call from_pretrained without "
                "distributed_config and tp_plan; plan.strategy says how Shardwise shards it"
            )
