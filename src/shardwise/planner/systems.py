"""Other training systems: the settings that `plan --like` takes from each, and its costs beyond those of the plan.

What a system does by default is what its documentation or source says (`source`). Its strategies are predicted with
our engine's rules or torch's; what it adds, in time or memory, is given here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.plan.placement import placement_of
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.losses import USUAL

OVERLAPS = ("all", "gradients", "none")
"""Communication that runs during computation: all; all but the gathers of updated parameters; nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a system trains.

    is_foreign          it runs on an engine that is neither ours nor torch's
    strategies          those that it has; the first is the one that `--like` predicts by default
    reduces_as_computed gradients are summed in the dtype of the computation, instead of fp32
    accumulate_reduced  every pass reduces its gradients
    overlap             see OVERLAPS
    tensor_seconds      strategy → additional seconds of a step per parameter tensor
    buffer_bytes        strategy → buffers that a rank holds in addition, of any model
    is_wrapped          False: an ordinary loop on one device, in which gradients exist from backward to the update
    copies_gradients    under ddp the buckets that are reduced are a second copy of the gradients
    is_expandable       the allocator has expandable segments
    """

    name: str = ""
    title: str = ""
    is_foreign: bool = False
    source: str = ""
    engine: str = "shardwise"
    strategies: tuple[str, ...] = ()
    reduces_as_computed: bool = False
    accumulate_reduced: bool = False
    overlap: str = "all"
    loss: str = USUAL
    tensor_seconds: Mapping[str, float] = field(default_factory=dict)
    buffer_bytes: Mapping[str, int] = field(default_factory=dict)
    is_wrapped: bool = True
    copies_gradients: bool = False
    is_expandable: bool = False

    def __post_init__(self) -> None:
        if self.overlap not in OVERLAPS:
            raise InvalidPlan(f"--overlap {self.overlap}: must be one of {', '.join(OVERLAPS)}")

    def __hash__(self) -> int:
        return hash((self.name, self.overlap))

    def check_ranks(self, num_ranks: int) -> None:
        if not self.is_wrapped and num_ranks > 1:
            raise InvalidPlan(
                f"--like {self.name}: is for one device, not {num_ranks}; --like torch-ddp is for several"
            )

    def added_bytes(self, spec: ModelSpec, *, strategy: str) -> int:
        """Return what a rank holds in addition under a strategy."""
        added = self.buffer_bytes.get(strategy, 0)
        if self.copies_gradients and not placement_of(strategy).optim.is_sharded:
            added += sum(param.num_bytes for unit in spec.units for param in unit.params if param.trainable)
        return added


OWN = System()
"""Our engine, or torch's."""

# DeepSpeed, "ZeRO optimizations" of its configuration: reduce_bucket_size = 5e8 elements, in a buffer of the dtype of
# the computation (contiguous_gradients); stage 3 keeps up to max_live_parameters = 1e9 gathered, which is more than the
# two units of the plan, and prefetches stage3_prefetch_bucket_size = 5e7.
_BUCKET, _PREFETCH = 2 * 500_000_000, 2 * 50_000_000
# Fitted to DeepSpeed's published rows of GPT-2 and BERT with ZeRO-2 and ZeRO-3 on 16 V100s, of 2021: hooks that copy,
# reduce or gather each tensor by itself, and wait. Its ZeRO-1 and plain data parallelism take as long as ours.
_DEEPSPEED = System(
    title="DeepSpeed",
    is_foreign=True,
    source="DeepSpeed's configuration: reduces in the dtype of the computation, stages 2 and 3 in every pass; "
    "stages 1 and 2 gather parameters after the update, without overlap",
    reduces_as_computed=True,
    accumulate_reduced=True,
    overlap="gradients",
    tensor_seconds={"zero2": 0.35e-3, "shard_grad_op": 1.2e-3, "fsdp": 1.2e-3},
    buffer_bytes={"zero2": _BUCKET, "fsdp": _BUCKET + _PREFETCH},
)
# torch's fully_shard, which several systems wrap.
_FULLY_SHARD = System(engine="torch", strategies=("fsdp", "shard_grad_op"))

_SYSTEMS = (
    replace(
        _FULLY_SHARD,
        name="torch-fsdp",
        title="PyTorch FSDP",
        source="torch.distributed.fsdp: without a reduce_dtype gradients are reduced in param_dtype; without no_sync "
        "in every pass",
        reduces_as_computed=True,
        accumulate_reduced=True,
    ),
    System(
        name="torch",
        title="PyTorch on one device",
        source="an ordinary loop: loss.backward(), optimizer.step(), optimizer.zero_grad(), as in torchtune's and "
        "litgpt's recipes for one device",
        engine="torch",
        strategies=("ddp",),
        is_wrapped=False,
    ),
    System(
        name="torch-ddp",
        title="PyTorch DDP",
        source="torch.nn.parallel.DistributedDataParallel: gradient_as_bucket_view = False; without no_sync gradients "
        "are reduced in every pass",
        engine="torch",
        strategies=("ddp",),
        accumulate_reduced=True,
        copies_gradients=True,
    ),
    replace(_DEEPSPEED, name="deepspeed", strategies=("zero2", "ddp", "zero1", "fsdp")),
    replace(_DEEPSPEED, name="deepspeed-zero2", strategies=("zero2",)),
    replace(_DEEPSPEED, name="deepspeed-zero3", strategies=("fsdp",)),
    System(
        name="megatron-ddp",
        title="Megatron-Core DDP",
        is_foreign=True,
        source="Megatron-Core, DistributedDataParallelConfig: overlap_grad_reduce and overlap_param_gather are off; "
        "with bf16 gradients are accumulated and reduced in fp32, once per step; zero1 is use_distributed_optimizer",
        strategies=("ddp", "zero1"),
        overlap="none",
    ),
    replace(
        _FULLY_SHARD,
        name="accelerate",
        title="Accelerate's FSDP plugin",
        source="accelerate: reduce_dtype = param_dtype with mixed_precision; accumulate() enters no_sync unless "
        "sync_each_batch is set",
        reduces_as_computed=True,
    ),
    replace(
        _FULLY_SHARD,
        name="torchtitan",
        title="torchtitan",
        source="torchtitan's configs: mixed_precision_param bfloat16, mixed_precision_reduce float32; its run_train.sh "
        "sets expandable_segments",
        accumulate_reduced=True,
        is_expandable=True,
    ),
)
SYSTEMS: Mapping[str, System] = MappingProxyType({system.name: system for system in _SYSTEMS})


def system_of(name: str) -> System:
    """Return a system by name; our own for the empty name."""
    if name and name not in SYSTEMS:
        raise UnknownName.of("system", name, known=SYSTEMS)
    return SYSTEMS[name] if name else OWN
