"""What a rank holds of a unit under torch's own engines: DistributedDataParallel, and `fully_shard`.

Read from torch 2.11 to 2.13: torch/csrc/distributed/c10d/reducer.cpp and torch/distributed/fsdp/_fully_shard, as
torch_engine/prepare.py sets them up.
"""

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.states import OptimizerRule, UnitStates, moment_bytes, rounded
from shardwise.program.buffers import param_dtypes
from shardwise.spec import TensorSpec, UnitSpec
from shardwise.vocabulary.dtypes import BYTES_PER_ELEMENT, PRECISIONS, master_dtype


def ddp_states(
    unit: UnitSpec,
    *,
    placement: Placement,
    plan: Plan,
    num_slices: int,
    optimizer: OptimizerRule,
    rules: MemoryRules,
) -> UnitStates:
    """DDP: parameters as the optimizer steps them, and a bucket's place for each gradient."""
    params = [(param, param.num_elements * _master_bytes(param, plan=plan)) for param in unit.params]
    steps = [(param, size) for param, size in params if param.trainable]
    trainable = [size for _, size in steps]
    elementwise = [size for param, size in steps if optimizer.of(param) is optimizer]
    held = tuple(rounded(size, rules=rules) for _, size in params)
    moments = moment_bytes(steps, optimizer=optimizer, rules=rules)
    return UnitStates(
        full=0,
        params=sum(held),
        optim=sum(moments),
        moments=moments,
        held=held,
        reduce=0,
        grads=sum(trainable),
        owned=sum(elementwise),
        largest=max(elementwise, default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
        gradients=tuple(rounded(size, rules=rules) for size in trainable),
    )


def fully_shard_states(
    unit: UnitSpec,
    *,
    placement: Placement,
    plan: Plan,
    num_slices: int,
    optimizer: OptimizerRule,
    rules: MemoryRules,
) -> UnitStates:
    """fully_shard: what rank 0 has of each parameter, which is cut along its first dimension, and padded."""
    shards = [(param, _shard_elements(param, num_slices=num_slices)) for param in unit.params]
    stepped = [(param, count * _master_bytes(param, plan=plan)) for param, count in shards]
    trainable = [size for param, size in stepped if param.trainable]
    computes = [(count, _compute_bytes(param, plan=plan)) for param, count in shards]
    casts = any(size != _master_bytes(param, plan=plan) for (_, size), param in zip(computes, unit.params, strict=True))
    reduce_bytes = BYTES_PER_ELEMENT[PRECISIONS[plan.reduce_dtype]]
    reduced = sum(count for param, count in shards if param.trainable) * reduce_bytes
    whole = [param.num_elements * reduce_bytes for param in unit.params if param.trainable]
    held = tuple(rounded(size, rules=rules) for _, size in stepped)
    steps = [(param, size) for param, size in stepped if param.trainable]
    moments = moment_bytes(steps, optimizer=optimizer, rules=rules)
    outputs = tuple(rounded(num_slices * count * size, rules=rules) for count, size in computes)
    in_shard = sum(count * size for count, size in computes)
    flat, copy_in = rounded(num_slices * in_shard, rules=rules), rounded(in_shard, rules=rules)
    if num_slices == 1:
        # Each parameter is cast, and copied, by itself.
        flat, copy_in = 0, max((count * size for count, size in computes), default=0)
    return UnitStates(
        full=sum(outputs),
        params=0 if casts else sum(held),
        optim=sum(moments) + (sum(held) if casts else 0),
        moments=moments,
        held=held,
        reduce=rounded(num_slices * reduced, rules=rules),
        grads=rounded(sum(trainable), rules=rules),
        owned=sum(trainable),
        largest=max(trainable, default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
        flat=flat,
        copy_in=copy_in if casts else 0,
        outputs=outputs,
        gradients=tuple(rounded(size, rules=rules) for size in whole),
    )


def _compute_bytes(param: TensorSpec, *, plan: Plan) -> int:
    return BYTES_PER_ELEMENT[param_dtypes(param, plan=plan)[0]]


def _master_bytes(param: TensorSpec, *, plan: Plan) -> int:
    return BYTES_PER_ELEMENT[master_dtype(param.dtype, precision=plan.precision)]


def _shard_elements(param: TensorSpec, *, num_slices: int) -> int:
    """The elements of the largest shard, to which all others are padded."""
    if not param.shape:
        return 1
    rows = -(-param.shape[0] // num_slices)
    return rows * (param.num_elements // param.shape[0]) if param.shape[0] else 0
