"""Writes a plan as a Python file for Lightning: `from lightning_trainer import make_trainer`."""

from shardwise.interchange.exported import Exported, JobShape, file_header, host_notes, not_expressed
from shardwise.plan import Plan
from shardwise.plan.placement import placement_of
from shardwise.plan.policy import Cut, UnitPolicy

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "native": "32-true"}
_EXPRESSED = {"strategy", "units", "micro_batch", "accumulate", "precision", "recompute"}
_STAGES = {"zero1": 1, "zero2": 2}
_NAMED = '''
BLOCKS = {names!r}


def is_block(module, recurse, nonwrapped_numel):
    """Return whether FSDP wraps this module; torch calls this for every module."""
    return recurse or type(module).__name__ in BLOCKS

'''
_BODY = '''
def make_trainer(**settings):
    """Return the Trainer of this plan; your arguments replace the plan's."""
    plan = dict(
        accelerator="auto",
        devices={devices},
        num_nodes={nodes},
        precision={precision!r},
        accumulate_grad_batches={accumulate},
        strategy={strategy},
    )
    return Trainer(**(plan | settings))
'''


def to_lightning(plan: Plan, shape: JobShape) -> Exported:
    sharded = placement_of(plan.strategy).params.is_sharded
    policy = UnitPolicy.parse(plan.units)
    offloads = sharded or plan.strategy in _STAGES
    expressed = _EXPRESSED | ({"mesh"} if sharded else set())
    expressed |= {"offload_states", "offload_update"} if offloads else set()
    left_out = not_expressed(plan, target="Lightning's Trainer", expressed=expressed)
    left_out += host_notes(plan, target="Lightning") if offloads else []
    named = policy.cut is Cut.CLASSES and sharded
    if sharded:
        if policy.cut not in (Cut.CLASSES, Cut.MIN_PARAMS, Cut.NOTHING):
            left_out.append(
                f"units = {plan.units}: name the classes of the blocks in `BLOCKS` (nothing is wrapped yet)"
            )
            named = True
        if plan.recompute == "selective":
            left_out.append("recompute = selective: Lightning recomputes whole blocks; this file turns it off")
    elif plan.recompute != "none":
        left_out.append(f"recompute = {plan.recompute}: Lightning has it under FSDP only; checkpoint in the model")
    notes = ["from lightning_trainer import make_trainer; make_trainer().fit(module)"]
    if plan.micro_batch is not None:
        notes.append(f"In the DataLoader: batch_size={plan.micro_batch}")
    strategy, imported = _strategy(plan, policy=policy, named=named)
    text = file_header(*notes, left_out=left_out) + "\n" + "".join(f"{line}\n" for line in imported)
    text += _NAMED.format(names=list(policy.class_names)) if named else ""
    text += _BODY.format(
        devices=shape.ranks_per_node,
        nodes=shape.num_nodes,
        precision=_PRECISIONS[plan.precision],
        accumulate=plan.accumulate,
        strategy=strategy,
    )
    return Exported(files={"lightning_trainer.py": text}, left_out=tuple(left_out))


def _strategy(plan: Plan, *, policy: UnitPolicy, named: bool) -> tuple[str, list[str]]:
    """Return the Trainer's argument `strategy`, and the imports that it needs."""
    trainer = "from lightning.pytorch import Trainer"
    if plan.strategy in _STAGES:
        stage = _STAGES[plan.strategy]
        imported = ["from lightning.pytorch.strategies import DeepSpeedStrategy"]
        return f"DeepSpeedStrategy(stage={stage}, offload_optimizer={bool(plan.offload_states)})", [trainer, *imported]
    if not placement_of(plan.strategy).params.is_sharded:
        return '"ddp"', [trainer]
    imported = [trainer, "from lightning.pytorch.strategies import FSDPStrategy"]
    hybrid = plan.mesh is not None and plan.mesh.replicate > 1
    freed = placement_of(plan.strategy).reshard_after_forward
    names = {(True, False): "FULL_SHARD", (False, False): "SHARD_GRAD_OP", (True, True): "HYBRID_SHARD"}
    arguments = [f'sharding_strategy="{names.get((freed, hybrid), "_HYBRID_SHARD_ZERO2")}"']
    if hybrid and plan.mesh is not None:
        arguments.append(f"device_mesh=({plan.mesh.replicate}, {plan.mesh.shard})")
    if named:
        arguments.append("auto_wrap_policy=is_block")
    elif policy.cut is Cut.MIN_PARAMS:
        imported = ["from functools import partial", "", *imported]
        imported.append("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy")
        arguments.append(f"auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params={policy.min_params})")
    if plan.recompute == "full" and named:
        arguments.append("activation_checkpointing_policy=is_block")
    if plan.offload_states:
        arguments.append("cpu_offload=True")
    return f"FSDPStrategy({', '.join(arguments)})", imported
