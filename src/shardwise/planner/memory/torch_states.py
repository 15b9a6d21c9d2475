"""Bytes that a rank holds of a unit under torch's own engines: DistributedDataParallel and `fully_shard`.

From torch 2.11 to 2.13, torch/csrc/distributed/c10d/reducer.cpp and torch/distributed/fsdp/_fully_shard, as
engine/torch_engine/prepare.py configures them.
"""

from shardwise.base.vocabulary.dtypes import BYTES_PER_ELEMENT, PRECISIONS
from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.planner.memory.states import StateSetting, UnitStates
from shardwise.program.buffers import param_dtypes
from shardwise.program.spec import TensorSpec, UnitSpec


def ddp_states(unit: UnitSpec, *, placement: Placement, setting: StateSetting) -> UnitStates:
    """Return the states under DDP: parameters in the optimizer's dtype, and a place in a bucket per gradient."""
    params = [(param, param.num_elements * _master_bytes(param, plan=setting.plan)) for param in unit.params]
    steps = [(param, size) for param, size in params if param.trainable]
    elementwise = [size for param, size in steps if setting.optimizer.of(param) is setting.optimizer]
    held = tuple(setting.rounded(size) for _, size in params)
    moments = setting.moments(steps)
    return UnitStates(
        full=0,
        params=sum(held),
        optim=sum(moments),
        moments=moments,
        held=held,
        reduce=0,
        grads=sum(size for _, size in steps),
        owned=sum(elementwise),
        largest=max(elementwise, default=0),
        buffers=setting.buffer_bytes(unit),
        gradients=tuple(setting.rounded(size) for _, size in steps),
    )


def fully_shard_states(unit: UnitSpec, *, placement: Placement, setting: StateSetting) -> UnitStates:
    """Return the states under fully_shard: rank 0's shard of each parameter, cut along its first dimension."""
    plan, num_slices, rounded = setting.plan, setting.num_slices, setting.rounded
    shards = [(param, _shard_elements(param, num_slices=num_slices)) for param in unit.params]
    stepped = [(param, count * _master_bytes(param, plan=plan)) for param, count in shards]
    steps = [(param, size) for param, size in stepped if param.trainable]
    trainable = [size for _, size in steps]
    computes = [(count, BYTES_PER_ELEMENT[param_dtypes(param, plan=plan)[0]]) for param, count in shards]
    # Frozen parameters that are held in the dtype that computes are not cast.
    is_cast = [size != _master_bytes(param, plan=plan) for (_, size), param in zip(computes, unit.params, strict=True)]
    casts = [count * size for (count, size), cast in zip(computes, is_cast, strict=True) if cast]
    reduce_bytes = BYTES_PER_ELEMENT[PRECISIONS[plan.reduce_dtype]]
    reduced = sum(count for param, count in shards if param.trainable) * reduce_bytes
    held = tuple(rounded(size) for _, size in stepped)
    moments = setting.moments(steps)
    outputs = tuple(rounded(num_slices * count * size) for count, size in computes)
    in_shard = sum(count * size for count, size in computes)
    flat, copy_in = rounded(num_slices * in_shard), rounded(sum(casts))
    if num_slices == 1:
        # Each parameter is cast and copied by itself.
        flat, copy_in = 0, max(casts, default=0)
    # On one rank foreach_reduce skips the loop whose variable keeps it.
    last = next((param for param in reversed(unit.params) if param.trainable and num_slices > 1), None)
    masters = sum(size for size, cast in zip(held, is_cast, strict=True) if cast)
    return UnitStates(
        full=sum(outputs),
        params=sum(held) - masters,
        optim=sum(moments) + masters,
        moments=moments,
        held=held,
        reduce=rounded(num_slices * reduced),
        grads=rounded(sum(trainable)),
        owned=sum(trainable),
        largest=max(trainable, default=0),
        buffers=setting.buffer_bytes(unit),
        flat=flat,
        copy_in=copy_in,
        outputs=outputs,
        gradients=tuple(rounded(param.num_elements * reduce_bytes) for param in unit.params if param.trainable),
        last_grad=rounded(last.num_elements * BYTES_PER_ELEMENT[param_dtypes(last, plan=plan)[0]]) if last else 0,
    )


def _master_bytes(param: TensorSpec, *, plan: Plan) -> int:
    return BYTES_PER_ELEMENT[param_dtypes(param, plan=plan)[1]]


def _shard_elements(param: TensorSpec, *, num_slices: int) -> int:
    """Return the elements of the largest shard, to which all others are padded."""
    if not param.shape:
        return 1
    rows = -(-param.shape[0] // num_slices)
    return rows * (param.num_elements // param.shape[0]) if param.shape[0] else 0
