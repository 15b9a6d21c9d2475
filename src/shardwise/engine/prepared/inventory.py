"""The memory that a rank holds for a model, by category."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.vocabulary.categories import GATHERED, GRADS, HOST, OPTIM, OTHER, PARAMS, REDUCE
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.engine import EngineParts, engine_of


def held_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Return the bytes that this rank holds between steps: `params`, `gathered`, `grads`, `optim`, and on the `host`.

    params    the full buffers of replicated parameters, the slices of sharded ones that compute in fp32
    gathered  full buffers of sharded parameters that are not freed
    grads     reduced gradients
    optim     the optimizer's state, its fp32 master if that is a separate copy, and averages (shardwise.EMA)
    host      all of the above that the plan offloads, without gradients
    """
    held = dict.fromkeys((PARAMS, GATHERED, GRADS, OPTIM, HOST), 0)
    seen: set[int] = set()
    engine = engine_of(model)
    for flat in engine.core.flats:
        for category, tensor in _of_flat(flat, optimizer):
            storage = tensor.untyped_storage()
            # Views share a storage: a bucket's gradients, a master that is the full buffer.
            if storage.data_ptr() not in seen and category in held:
                seen.add(storage.data_ptr())
                held[category] += storage.nbytes()
    for category, average in _averages(engine):
        held[category] += average.nbytes
    for category, state in _of_matrices(engine, optimizer):
        held[category] += state.nbytes
    return held


def held_tensors(engine: EngineParts, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (category, tensor) for all memory that the engine knows at this moment; a storage has its first category.

    As above, and: reduce, the buffers that are being reduced, and autograd's gradients that are not yet in them;
    other, the module's buffers, the flags of used parameters, and the memory through which states on the host pass.
    """
    yield from _of_buckets(engine)
    for flat in engine.core.flats:
        yield from _of_flat(flat, optimizer)
    yield from _averages(engine)
    yield from _of_matrices(engine, optimizer)
    for buffer in engine.core.model.buffers():
        yield OTHER, buffer
    yield OTHER, engine.core.executor.flags.flags
    yield from ((OTHER, buffer) for buffer in engine.owned.streamed.slot_tensors())


def _averages(engine: EngineParts) -> Iterator[tuple[str, Tensor]]:
    """Yield the averages of the parameters (shardwise.EMA), which are where the masters are."""
    for ema in engine.averages:
        for average in ema.tensors():
            yield HOST if average.device.type != engine.device.type else OPTIM, average


def _of_matrices(engine: EngineParts, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of matrices that this rank owns; during an update also the matrices and their gradients."""
    if optimizer is None:
        return
    for matrix in engine.owned.matrices.of(optimizer):
        if matrix.unsharded is None:
            continue
        for value in optimizer.state.get(matrix.unsharded, {}).values():
            if isinstance(value, Tensor):
                yield OPTIM, value
        if matrix.unsharded.grad is not None:
            yield OTHER, matrix.unsharded.grad
            yield OTHER, matrix.unsharded.detach()


def _of_flat(flat: FlatParams, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    sharded = flat.placement.params.is_sharded
    yield GATHERED if sharded else PARAMS, flat.full.buffer
    on_host = flat.master.host is not None
    is_the_parameter = sharded and flat.compute_dtype == flat.master_dtype
    # Without a wait for an update that is still writing it.
    yield HOST if on_host else PARAMS if is_the_parameter else OPTIM, flat.master.unsettled
    # The slice of which this rank's master is a part.
    yield PARAMS if flat.placement.optim.is_sharded_across else HOST, flat.master.staged
    for part in flat.master.owned:
        for value in (optimizer.state.get(part.parameter, {}) if optimizer else {}).values():
            if isinstance(value, Tensor):
                yield HOST if on_host else OPTIM, value
    averages = [part.parameter.grad for part in flat.master.owned if part.parameter is not flat.params[part.index]]
    for grad in (*averages, *flat.grads.hidden):
        if grad is not None and (flat.master.host is None or flat.master.host.keeps_grads):
            yield GRADS, grad
    # After zero_grad an update may still read them.
    yield from ((GRADS, grad) for grad in flat.master.in_use or ())
    yield from ((REDUCE, grad) for grad in flat.grads.rows())
    if flat.grads.begun is not None:
        yield GRADS, flat.grads.begun
    with unguarded():
        shown = [parameter.grad for parameter in flat.params]
    for grad in shown:
        if grad is not None:
            # During a backward it is autograd's, until it is copied into a bucket.
            yield REDUCE if flat.grads.awaits else GRADS, grad


def _of_buckets(engine: EngineParts) -> Iterator[tuple[str, Tensor]]:
    for bucket in engine.core.executor.buckets.values():
        for segment in bucket.segments:
            if segment.kept is not None:
                yield GRADS, segment.kept
            for tensor in (segment.buffer, segment.slice):
                if tensor is not None:
                    yield REDUCE, tensor
