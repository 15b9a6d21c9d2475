"""Finds the mistakes that the file of a setup alone shows."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from shardwise.interchange.foreign_setup import ForeignSetup
from shardwise.interchange.mistakes import Mistake
from shardwise.interchange.setting_values import as_bool, as_count
from shardwise.plan.placement import SHARDED, placement_of

_OF_VERSION_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
_EMBEDDINGS = ("Embedding", "Linear", "LMHead")
# The keys of `fsdp_config` that Accelerate knows.
_ACCELERATE_FSDP = {
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_offload_params"),
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_backward_prefetch"),
    *("fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_sync_module_states", "fsdp_activation_checkpointing", "fsdp_ignored_modules"),
}


def check_setup(setup: ForeignSetup) -> list[Mistake]:
    return [finding for check in _CHECKS for finding in check(setup)]


def _nothing_wrapped(setup: ForeignSetup) -> Iterator[Mistake]:
    if setup.plan.units == "none" and placement_of(setup.plan.strategy).params is SHARDED:
        fixes = {
            "accelerate": "set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "lightning": "give FSDPStrategy an auto_wrap_policy with the class of the model's blocks",
            "transformers": 'write fsdp: "full_shard auto_wrap"',
        }
        yield Mistake(
            code="SW101",
            line="no wrap policy, so the whole model is gathered at once and sharding saves little",
            fix=fixes.get(setup.tool, "name the classes of the model's blocks"),
        )


def _mixed_versions(setup: ForeignSetup) -> Iterator[Mistake]:
    version = as_count(setup.settings.get("fsdp_config.fsdp_version", setup.settings.get("fsdp_config.version")))
    found = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in setup.settings if key.startswith("fsdp")}
    if version == 2:
        old = [found[name].rpartition(".")[2] for name in _OF_VERSION_1 if name in found]
        if old:
            yield Mistake(
                code="SW102",
                line=f"{', '.join(old)} belong to version 1, and version 2 ignores them",
                fix="remove them; version 2 has fsdp_reshard_after_forward: true or false",
            )
        value = setup.settings.get(found.get("reshard_after_forward", ""))
        if isinstance(value, str) and value.lower() not in ("true", "false"):
            yield Mistake(
                code="SW102",
                line=f"fsdp_reshard_after_forward: {value} is a strategy of version 1",
                fix="write true (FULL_SHARD) or false (SHARD_GRAD_OP)",
            )
    elif isinstance(setup.settings.get(found.get("reshard_after_forward", "")), bool):
        yield Mistake(
            code="SW102",
            line="fsdp_reshard_after_forward as a switch belongs to version 2, and this file is of version 1",
            fix="set fsdp_version: 2, or name fsdp_sharding_strategy",
        )


def _narrow_masters(setup: ForeignSetup) -> Iterator[Mistake]:
    if setup.master_dtype != "fp32":
        fixes = {"lightning": 'precision: "bf16-mixed"', "torchtitan": 'training.dtype = "float32"'}
        yield Mistake(
            code="SW103",
            line=f"weights and optimizer are in {setup.master_dtype}, where updates below 1/256 of a weight vanish",
            fix=f"write {fixes.get(setup.tool, 'mixed precision')}, or use an optimizer that rounds stochastically",
        )


def _synchronising_passes(setup: ForeignSetup) -> Iterator[Mistake]:
    if setup.plan.accumulate <= 1:
        return
    if setup.plan.accumulate_reduced:
        yield Mistake(
            code="SW106",
            line=f"ZeRO stages 2 and 3 reduce gradients in each of the {setup.plan.accumulate} passes",
            fix="stage 1 reduces once per step, if its gradients fit; or use fewer, larger passes",
        )
    elif as_bool(setup.settings.get("gradient_accumulation_plugin.sync_each_batch")):
        yield Mistake(
            code="SW106",
            line=f"sync_each_batch reduces gradients in each of the {setup.plan.accumulate} passes",
            fix="leave it out, if the gradients of a whole step fit",
        )


def _split_ties(setup: ForeignSetup) -> Iterator[Mistake]:
    split = [name for name in setup.wraps or () if name.endswith(_EMBEDDINGS)]
    if split:
        yield Mistake(
            code="SW107",
            line=f"{', '.join(split)} as units of their own: an embedding tied to the head becomes two parameters",
            fix="wrap the model's blocks alone, so that both stay with the root",
        )


def _uneven_batches(setup: ForeignSetup) -> Iterator[Mistake]:
    settings = setup.settings
    if settings.get("use_distributed_sampler", True) is False:
        yield Mistake(
            code="SW108",
            line="use_distributed_sampler: false, so every rank reads all samples, and all ranks the same ones",
            fix="leave it out, or give the DataLoader a DistributedSampler of your own",
        )
    even = next((settings[key] for key in settings if key.rpartition(".")[2] == "even_batches"), True)
    if not as_bool(even):
        yield Mistake(
            code="SW108",
            line="even_batches: false: a rank that runs out of batches first leaves the others waiting",
            fix="leave it out, or wrap the loop in accelerator.join_uneven_inputs",
        )


def _narrow_range(setup: ForeignSetup) -> Iterator[Mistake]:
    if setup.plan.precision == "fp16" and setup.settings.get("fp16.loss_scale", 0) not in (0, None):
        yield Mistake(
            code="SW110",
            line=f"fp16 with a fixed loss scale of {setup.settings['fp16.loss_scale']}: gradients overflow or vanish",
            fix="set fp16.loss_scale to 0, which adapts it, or use bf16, which needs none",
        )


def _contradicting_sizes(setup: ForeignSetup) -> Iterator[Mistake]:
    settings, plan = setup.settings, setup.plan
    total = as_count(settings.get("train_batch_size"), default=0)
    if setup.tool == "deepspeed" and total and plan.micro_batch:
        each = plan.micro_batch * plan.accumulate
        if total % each:
            yield Mistake(
                code="SW112",
                line=f"train_batch_size {total} is not a multiple of {each} (samples per rank × passes)",
                fix=f"set it to {each} × the number of ranks",
            )
    machines = as_count(settings.get("num_machines"))
    if setup.tool == "accelerate" and setup.num_ranks is not None and setup.num_ranks % machines:
        yield Mistake(
            code="SW112",
            line=f"num_processes {setup.num_ranks} counts the whole job, and is not a multiple of {machines} machines",
            fix=f"set it to {machines} × the GPUs per machine",
        )
    if setup.tool == "torchtitan":
        total = as_count(settings.get("training.global_batch_size", -1), default=0)
        each = (plan.micro_batch or 0) * (setup.num_ranks or 0)
        if total and each and total % each:
            yield Mistake(
                code="SW112",
                line=f"global_batch_size {total} is not a multiple of {each} (samples per rank × ranks)",
                fix=f"set it to a multiple of {each}",
            )


def _recomputed_twice(setup: ForeignSetup) -> Iterator[Mistake]:
    settings = setup.settings
    both = as_bool(settings.get("gradient_checkpointing")) and any(
        as_bool(value) for key, value in settings.items() if key.endswith("activation_checkpointing")
    )
    if both:
        yield Mistake(
            code="SW113",
            line="gradient_checkpointing and FSDP's activation_checkpointing are both on: layers are gathered twice",
            fix="keep FSDP's, and set gradient_checkpointing: false",
        )


def _unknown_keys(setup: ForeignSetup) -> Iterator[Mistake]:
    if setup.tool != "accelerate":
        return
    for key in setup.settings:
        table, _, name = key.rpartition(".")
        if table == "fsdp_config" and name not in _ACCELERATE_FSDP:
            near = get_close_matches(name, _ACCELERATE_FSDP, n=1)
            yield Mistake(
                code="SW114",
                line=f"{key} is not a key that Accelerate reads",
                fix=f"did you mean {near[0]}?" if near else "remove it",
            )


_CHECKS: tuple[Callable[[ForeignSetup], Iterator[Mistake]], ...] = (
    *(_nothing_wrapped, _mixed_versions, _narrow_masters, _synchronising_passes, _split_ties, _uneven_batches),
    *(_narrow_range, _contradicting_sizes, _recomputed_twice, _unknown_keys),
)
