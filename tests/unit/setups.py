"""Files of other tools as people write them: healthy ones, and ones with a mistake."""

from typing import Any

ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
LIGHTNING: dict[str, Any] = {
    "trainer": {
        "devices": 8,
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "strategy": {
            "class_path": "lightning.pytorch.strategies.FSDPStrategy",
            "init_args": {"auto_wrap_policy": ["model.Block"]},
        },
    }
}
TRAINER: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "bf16": True,
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
TORCHTITAN: dict[str, Any] = {
    "training": {"local_batch_size": 2, "global_batch_size": 32, "mixed_precision_param": "bfloat16"},
    "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 8},
    "activation_checkpoint": {"mode": "full"},
}
MULTI_GPU: dict[str, Any] = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4}
HEALTHY = {
    "accelerate": ACCELERATE,
    "accelerate ddp": MULTI_GPU,
    "deepspeed": DEEPSPEED,
    "lightning": LIGHTNING,
    "trainer": TRAINER,
    "torchtitan": TORCHTITAN,
}


def changed(setup: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A setup with other values; `None` takes a key away, and `a__b` is key b of table a."""
    found: dict[str, Any] = {key: changed(value) if isinstance(value, dict) else value for key, value in setup.items()}
    for path, value in changes.items():
        *tables, key = path.split("__")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
        if value is None:
            table.pop(key)
        else:
            table[key] = value
    return found


# What is wrong → (the code, the setup).
PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "no wrap policy": ("SW101", changed(ACCELERATE, fsdp_config__fsdp_auto_wrap_policy="NO_WRAP")),
    "no wrap policy in the Trainer": ("SW101", changed(TRAINER, fsdp="full_shard", fsdp_config=None)),
    "no wrap policy in Lightning": ("SW101", changed(LIGHTNING, trainer__strategy="fsdp")),
    "a strategy of version 1": ("SW102", changed(ACCELERATE, fsdp_config__fsdp_sharding_strategy="FULL_SHARD")),
    "version 1 with version 2's switch": ("SW102", changed(ACCELERATE, fsdp_config__fsdp_version=1)),
    "a strategy as the switch": ("SW102", changed(ACCELERATE, fsdp_config__fsdp_reshard_after_forward="FULL_SHARD")),
    "bf16 weights in Lightning": ("SW103", changed(LIGHTNING, trainer__precision="bf16-true")),
    "bf16 weights in torchtitan": ("SW103", changed(TORCHTITAN, training__dtype="bfloat16")),
    "passes that reduce": ("SW106", changed(DEEPSPEED, gradient_accumulation_steps=4, train_batch_size=256)),
    "a tied embedding as a unit": (
        "SW107",
        changed(ACCELERATE, fsdp_config__fsdp_transformer_layer_cls_to_wrap="GPT2Block,Embedding"),
    ),
    "no sampler": ("SW108", changed(LIGHTNING, trainer__use_distributed_sampler=False)),
    "uneven batches": ("SW108", changed(ACCELERATE, dataloader_config__even_batches=False)),
    "a fixed loss scale": ("SW110", changed(DEEPSPEED, bf16=None, fp16={"enabled": True, "loss_scale": 128})),
    "a batch that does not divide": ("SW112", changed(DEEPSPEED, train_batch_size=60)),
    "processes that do not divide": ("SW112", changed(ACCELERATE, num_machines=3)),
    "a global batch that does not divide": ("SW112", changed(TORCHTITAN, training__global_batch_size=40)),
    "recomputed twice": (
        "SW113",
        changed(TRAINER, gradient_checkpointing=True, fsdp_config__activation_checkpointing=True),
    ),
    "a stage in quotes": ("SW115", changed(DEEPSPEED, zero_optimization__stage="3")),
    "a key with a typing mistake": ("SW114", changed(ACCELERATE, fsdp_config__fsdp_reshard_after_foward=True)),
}
