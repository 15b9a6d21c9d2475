"""Finds the mistakes that the file of a setup alone shows."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

from shardwise.doors.interchange.foreign_setup import ForeignSetup
from shardwise.doors.interchange.from_torchtitan import or_rest
from shardwise.doors.interchange.mistakes import Mistake
from shardwise.plan.placement import placement_of

_OF_VERSION_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
_EMBEDDINGS = ("Embedding", "Linear", "LMHead")
# The keys of `fsdp_config` that Accelerate knows.
_ACCELERATE_FSDP = {
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_offload_params"),
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_backward_prefetch"),
    *("fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_sync_module_states", "fsdp_activation_checkpointing", "fsdp_ignored_modules"),
}


Finding = tuple[str, str]
"""The line and the fix of a mistake."""


def check_setup(setup: ForeignSetup) -> list[Mistake]:
    found = [(code, finding) for code, check in _CHECKS.items() for finding in check(setup)]
    if setup.settings.wrong:
        # Alone: the others may be about the defaults that were read in place of these.
        found = [("SW115", finding) for finding in setup.settings.wrong.values()]
    return [Mistake(code=code, line=line, fix=fix) for code, (line, fix) in found]


def _nothing_wrapped(setup: ForeignSetup) -> Iterator[Finding]:
    if setup.plan.units == "none" and placement_of(setup.plan.strategy).params.is_sharded:
        fixes = {
            "accelerate": "set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "lightning": "give FSDPStrategy an auto_wrap_policy with the class of the model's blocks",
            "transformers": 'write fsdp: "full_shard auto_wrap"',
        }
        yield (
            "no wrap policy, so the whole model is gathered at once and sharding saves little",
            fixes.get(setup.tool, "name the classes of the model's blocks"),
        )


def _mixed_versions(setup: ForeignSetup) -> Iterator[Finding]:
    settings = setup.settings
    found = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in settings.values if key.startswith("fsdp")}
    if settings.one_of(found.get("version", ""), {1: 1, 2: 2}, default=1) == 2:
        old = [found[name].rpartition(".")[2] for name in _OF_VERSION_1 if name in found]
        if old:
            yield (
                f"{', '.join(old)} belong to version 1, and version 2 ignores them",
                "remove them; version 2 has fsdp_reshard_after_forward: true or false",
            )
        value = settings.values.get(found.get("reshard_after_forward", ""))
        if isinstance(value, str) and value.lower() not in ("true", "false"):
            yield (
                f"fsdp_reshard_after_forward: {value} is a strategy of version 1",
                "write true (FULL_SHARD) or false (SHARD_GRAD_OP)",
            )
    elif isinstance(settings.values.get(found.get("reshard_after_forward", "")), bool):
        yield (
            "fsdp_reshard_after_forward as a switch belongs to version 2, and this file is of version 1",
            "set fsdp_version: 2, or name fsdp_sharding_strategy",
        )


def _narrow_masters(setup: ForeignSetup) -> Iterator[Finding]:
    if setup.master_dtype != "fp32":
        fixes = {"lightning": 'precision: "bf16-mixed"', "torchtitan": 'training.dtype = "float32"'}
        yield (
            f"weights and optimizer are in {setup.master_dtype}, where updates below 1/256 of a weight vanish",
            f"write {fixes.get(setup.tool, 'mixed precision')}, or use an optimizer that rounds stochastically",
        )


def _synchronising_passes(setup: ForeignSetup) -> Iterator[Finding]:
    if setup.plan.accumulate <= 1:
        return
    if setup.plan.accumulate_reduced:
        yield (
            f"ZeRO stages 2 and 3 reduce gradients in each of the {setup.plan.accumulate} passes",
            "stage 1 reduces once per step, if its gradients fit; or use fewer, larger passes",
        )
    elif setup.settings.switch("gradient_accumulation_plugin.sync_each_batch"):
        yield (
            f"sync_each_batch reduces gradients in each of the {setup.plan.accumulate} passes",
            "leave it out, if the gradients of a whole step fit",
        )


def _split_ties(setup: ForeignSetup) -> Iterator[Finding]:
    split = [name for name in setup.wraps or () if name.endswith(_EMBEDDINGS)]
    if split:
        yield (
            f"{', '.join(split)} as separate units: an embedding tied to the head becomes two parameters",
            "wrap the model's blocks alone, so that both stay with the root",
        )


def _uneven_batches(setup: ForeignSetup) -> Iterator[Finding]:
    settings = setup.settings
    if not settings.switch("use_distributed_sampler", default=True):
        yield (
            "use_distributed_sampler: false, so every rank reads all samples, and all ranks the same ones",
            "leave it out, or give the DataLoader a DistributedSampler of your own",
        )
    even = next((key for key in settings.values if key.rpartition(".")[2] == "even_batches"), "")
    if not settings.switch(even, default=True):
        yield (
            "even_batches: false: a rank that runs out of batches first leaves the others waiting",
            "leave it out, or wrap the loop in accelerator.join_uneven_inputs",
        )


def _narrow_range(setup: ForeignSetup) -> Iterator[Finding]:
    scale = setup.settings.number("fp16.loss_scale")
    if setup.plan.precision == "fp16" and scale:
        yield (
            f"fp16 with a fixed loss scale of {scale:g}: gradients overflow or vanish",
            "set fp16.loss_scale to 0, which adapts it, or use bf16, which needs none",
        )


def _contradicting_sizes(setup: ForeignSetup) -> Iterator[Finding]:
    settings, plan = setup.settings, setup.plan
    total = settings.count("train_batch_size", default=0)
    if setup.tool == "deepspeed" and total and plan.micro_batch:
        each = plan.micro_batch * plan.accumulate
        if total % each:
            yield (
                f"train_batch_size {total} is not a multiple of {each} (samples per rank × passes)",
                f"set it to {each} × the number of ranks",
            )
    machines = settings.count("num_machines")
    if setup.tool == "accelerate" and setup.num_ranks is not None and setup.num_ranks % machines:
        yield (
            f"num_processes {setup.num_ranks} counts the whole job, and is not a multiple of {machines} machines",
            f"set it to {machines} × the GPUs per machine",
        )
    if setup.tool == "torchtitan":
        total = or_rest(settings, "training.global_batch_size")
        each = (plan.micro_batch or 0) * (setup.num_ranks or 0)
        if total and each and total % each:
            yield (
                f"global_batch_size {total} is not a multiple of {each} (samples per rank × ranks)",
                f"set it to a multiple of {each}",
            )


def _recomputed_twice(setup: ForeignSetup) -> Iterator[Finding]:
    settings = setup.settings
    own = [key for key in settings.values if key.endswith("activation_checkpointing")]
    if settings.switch("gradient_checkpointing") and any(settings.switch(key) for key in own):
        yield (
            "gradient_checkpointing and FSDP's activation_checkpointing are both on: layers are gathered twice",
            "keep FSDP's, and set gradient_checkpointing: false",
        )


def _unknown_keys(setup: ForeignSetup) -> Iterator[Finding]:
    if setup.tool != "accelerate":
        return
    for key in setup.settings.values:
        table, _, name = key.rpartition(".")
        if table == "fsdp_config" and name not in _ACCELERATE_FSDP:
            near = get_close_matches(name, _ACCELERATE_FSDP, n=1)
            yield (
                f"{key} is not a key that Accelerate reads",
                f"did you mean {near[0]}?" if near else "remove it",
            )


_CHECKS: Mapping[str, Callable[[ForeignSetup], Iterator[Finding]]] = {
    "SW101": _nothing_wrapped,
    "SW102": _mixed_versions,
    "SW103": _narrow_masters,
    "SW106": _synchronising_passes,
    "SW107": _split_ties,
    "SW108": _uneven_batches,
    "SW110": _narrow_range,
    "SW112": _contradicting_sizes,
    "SW113": _recomputed_twice,
    "SW114": _unknown_keys,
}
