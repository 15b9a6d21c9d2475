"""Methods that a prepared model overrides: state dicts, `zero_grad`, copies, and attributes that libraries read."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.engine.carry import carry_engine, drop_engine
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.engine import engine_of
from shardwise.engine.prepared.accumulate import accumulate
from shardwise.engine.prepared.full_state import full_tensors, load_tensors
from shardwise.engine.prepared.whole_parameters import whole


class PreparedModule(nn.Module):
    """A mixin for the model's own class: the model stays the same object and keeps its type."""

    # Accelerate's `prepare` returns such a model unchanged (seen with 1.15).
    _is_accelerate_prepared = True
    # Dynamo reads it if `_is_fsdp_managed_module` is true: modules compute with ordinary parameters.
    _fsdp_use_orig_params = True

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """Read by transformers' `generate`: a rank that has finished continues until all ranks have.

        Inside shardwise.evaluating it need not, and another rank may not generate at all.
        """
        return engine_of(self).core.followed.generates_together

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not reduce gradients in this block, as under DistributedDataParallel (`shardwise.accumulate`)."""
        return accumulate(engine_of(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including those of the optimizer's slices."""
        engine = engine_of(self)
        kept = [] if set_to_none else [part.parameter.grad for flat in engine.core.flats for part in flat.master.owned]
        engine.core.forget_grads({name for flat in engine.core.flats for name in flat.names}, drop=set_to_none)
        for grad in kept:
            if grad is not None:
                grad.zero_()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return full names, shapes and master values.

        Collective where this rank has only slices of them, except inside shardwise.whole.
        """
        if engine_of(self).core.setting.passes.lent:
            return super().state_dict(*arguments, **options)
        with unguarded():
            state = super().state_dict(*arguments, **{**options, "keep_vars": True})
        return full_tensors(engine_of(self), state, keep_vars=options.get("keep_vars", False))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors; every rank keeps its slices."""
        with unguarded():
            own = super().state_dict(keep_vars=True)
        return load_tensors(engine_of(self), own, state_dict, strict=strict)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Refuse `to`, `cuda`, `half` …, which would move parameters out of their buffers, if they change anything."""
        if _changes_nothing(self, function):
            return self
        raise InvalidModel("a prepared model cannot be moved or cast: do it before, or with device= and plan.precision")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return an ordinary, unsharded model of the original class. Collective where `state_dict` is."""
        engine = engine_of(self)
        engine.check_reduced(what="deepcopy(model)")
        with nullcontext() if engine.core.setting.passes.lent else whole(engine):
            return self._copied(memo)

    def _copied(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the model as torch does it, each parameter by its own class, without hooks and wrapped forwards."""
        engine = engine_of(self)
        drop_engine(self)
        engine.detach()
        prepared = type(self)
        # A traced module hands what is set on it to the module inside.
        object.__setattr__(self, "__class__", prepared.__mro__[2])
        try:
            return copy.deepcopy(self, memo)
        finally:
            object.__setattr__(self, "__class__", prepared)
            carry_engine(self, engine)
            engine.attach()
            engine.wrap()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidModel("a prepared model cannot be pickled: save shardwise.full_state_dict(model) instead")


def _changes_nothing(model: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether `function`, which a method like `to` applies to all tensors, returns each of them unchanged."""
    flats = engine_of(model).core.flats
    kinds = {(flat.compute_dtype, flat.device, len(shape)) for flat in flats for shape in flat.layout.shapes}
    kinds |= {(buffer.dtype, buffer.device, buffer.dim()) for buffer in model.buffers()}
    for dtype, device, num_dims in kinds:
        # Large enough to show another memory format.
        tried = torch.empty((2,) * num_dims, dtype=dtype, device=device)
        if function(tried) is not tried or (device.type == "cpu" and tried.is_shared()):  # type: ignore[no-untyped-call]
            return False
    return True


def become_prepared(model: nn.Module) -> None:
    """Mix PreparedModule into the model's class."""
    own = type(model)
    prepared = type(own.__name__, (PreparedModule, own), {"__module__": own.__module__})
    object.__setattr__(model, "__class__", prepared)
