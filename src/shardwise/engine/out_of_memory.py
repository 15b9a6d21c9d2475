"""Explains an out-of-memory error: which categories of memory were held, and where the step was.

A kernel of backward or of an optimizer may raise where none of our code catches it, and its memory is freed by the time
a caller does. But every torch.OutOfMemoryError is created by a call of its class. So while a prepared model is alive,
its `__init__` adds the explanation. It costs nothing while no step fails, and allocates no device memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, HOST, OTHER
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.base.vocabulary.while_alive import WhileAlive, replaced
from shardwise.comm.groups.rank_progress import PROGRESS, UPDATE
from shardwise.engine.engine import EngineParts, engine_of, is_prepared
from shardwise.engine.prepared.inventory import held_tensors


def explain_out_of_memory(model: nn.Module) -> None:
    """Explain the memory of this prepared model in out-of-memory errors, for as long as it exists."""
    _MODELS.add(model)


def _made(init: Callable[..., None], error: torch.OutOfMemoryError, *arguments: Any) -> None:
    """Add a note to an error that is made."""
    init(error, *arguments)
    engines = [engine_of(model) for model in _MODELS if is_prepared(model)]
    if not engines:
        return
    try:
        note = "\n".join(_describe(engines))
    except Exception as failed:
        # The user's error is the out-of-memory error, even if its explanation fails.
        note = f"shardwise could not tell what the memory was held for: {type(failed).__name__}: {failed}"
    error.add_note(note)


_MODELS: WhileAlive[nn.Module] = WhileAlive(replaced(torch.OutOfMemoryError, "__init__", _made))


def _describe(engines: Sequence[EngineParts]) -> Iterator[str]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    yield f"rank {rank} ran out of memory in {PROGRESS.standing(rank, idle_seconds=0.0)}"
    held = held_now(engines)
    shown = ", ".join(f"{category} {bytes_text(held[category])}" for category in CATEGORIES if category in held)
    yield f"  held then: {shown}{_of_device(engines[0].device)}"
    for engine in engines:
        if engine.predict is not None:
            yield from _states(engine)
            yield (
                "  what a whole step needs, and which plan fits: shardwise plan python:FILE.py:FUNCTION --cluster "
                f"{dist.get_world_size()}xDEVICE, where FUNCTION returns shardwise.Task(model, loss, make_batch); it "
                "traces the model with a batch, which is not done in the middle of a step"
            )


def held_now(engines: Sequence[EngineParts]) -> dict[str, int]:
    """Return the bytes on the device by category.

    Allocated memory that the engines do not know is activations in forward and backward, and optimizer temporaries in
    an update; on a CPU, allocations are not counted.
    """
    device = engines[0].device
    seen: dict[int, tuple[str, int]] = {}
    for engine in engines:
        optimizers: list[Optimizer | None] = [*engine.owned.group_names]
        for optimizer in optimizers or [None]:
            for category, tensor in held_tensors(engine, optimizer):
                storage = tensor.untyped_storage()
                if tensor.device == device and category != HOST and storage.nbytes():
                    seen.setdefault(storage.data_ptr(), (category, storage.nbytes()))
    held = dict.fromkeys(CATEGORIES, 0)
    for category, num_bytes in seen.values():
        held[category] += num_bytes
    if device.type != "cuda":
        del held[ACTIVATIONS]
        return held
    unknown = max(0, torch.cuda.memory_allocated(device) - sum(held.values()))
    held[OTHER if PROGRESS.phase == UPDATE else ACTIVATIONS] += unknown
    return held


def _of_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "; activations are not counted on a CPU"
    total = torch.cuda.get_device_properties(device).total_memory
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"; in all {bytes_text(allocated)} allocated and {bytes_text(reserved)} reserved of the device's "
        f"{bytes_text(total)}"
    )


def _states(engine: EngineParts) -> Iterator[str]:
    """Predict the peak of each strategy without activations."""
    assert engine.predict is not None
    followed, optimizer = engine.core.followed, next(iter(engine.owned.group_names), None)
    needs = engine.predict(
        followed.spec,
        plan=followed.plan,
        num_ranks=dist.get_world_size(),
        optimizer=optimizer,
        device=engine.device.type,
    )
    if needs:
        this = {followed.plan.strategy: " (this plan)"}
        shown = ", ".join(f"{name} {bytes_text(num_bytes)}{this.get(name, '')}" for name, num_bytes in needs.items())
        yield f"  predicted peak without activations: {shown}"
