"""An exponential moving average of a model's parameters, kept as each rank's slices of what its optimizer steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, InvalidModel, InvalidPlan
from shardwise.comm.groups.agreement import meet
from shardwise.engine.core.edited_values import distribute
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_events import announce
from shardwise.engine.engine import engine_of, is_prepared

_APPLIED = "ema.applied()"


class EMA:
    """average ← decay · average + (1 − decay) · parameter, for every parameter that is trained.

        ema = shardwise.EMA(model, decay=0.999)
        ...
            optimizer.step()
            ema.update()
        with ema.applied(), torch.no_grad():
            evaluate(model)

    An update needs no communication: each rank averages the slices that it steps, in fp32 or wider. Frozen parameters
    have no average, because it would equal their value; buffers are not averaged. `decay` may be changed between steps.
    Checkpoints contain the averages if they get the EMA (`checkpoints.save(model, optimizer, step=step, ema=ema)`).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not is_prepared(model):
            raise InvalidPlan(
                "shardwise.EMA needs a model of shardwise.prepare with engine = 'shardwise'; for any other there is "
                "torch.optim.swa_utils.AveragedModel"
            )
        self._engine = engine_of(model)
        self.decay = decay
        self.num_updates = 0
        announce(self._engine.core.setting.events.values_read, False)
        self._averages = {
            flat: flat.master.values.detach().to(_dtype(flat), copy=True)
            for flat in self._engine.core.flats
            if _is_trained(flat)
        }
        # A parameter that was frozen after `prepare` is in one buffer with trained ones, and has no average.
        self._averaged = {name for flat in self._engine.core.flats for name in _trained(flat)}
        self._engine.averages.add(self)

    @property
    def decay(self) -> float:
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 1:
            raise InvalidData(f"decay = {value!r}: must be a number from 0 to 1")
        self._decay = float(value)

    @torch.no_grad()
    def update(self) -> None:
        """Average the parameters after an update. Local to this rank."""
        core = self._engine.core
        core.setting.passes.check_values("ema.update()")
        announce(core.setting.events.values_read, False)
        for flat in self._engine.core.flats:
            for name in sorted(_trained(flat) - self._averaged):
                raise InvalidModel(
                    f"{name} was frozen when shardwise.EMA was made, and has no average: make a new one after "
                    "parameters are thawed"
                )
        for flat, average in self._averages.items():
            average.lerp_(flat.master.values.to(average.dtype), 1 - self._decay)
        self._follow_frozen()
        self.num_updates += 1

    def _follow_frozen(self) -> None:
        """Give parameters without an average their value, where it was written."""
        for flat, average in self._averages.items():
            for part in flat.master.owned:
                if flat.names[part.index] not in self._averaged:
                    average[part.start : part.stop].copy_(flat.master.values[part.start : part.stop])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters their averages as values, to evaluate or export. Collective; no step in this block.

        This rank keeps a copy of its slices, and restores them after the block.
        """
        engine = self._engine
        passes = engine.core.setting.passes
        passes.check_values(_APPLIED)
        engine.check_between_steps(what=_APPLIED)
        meet(_APPLIED, limit_seconds=engine.core.followed.limit_seconds)
        engine.core.wait_gathers()
        announce(engine.core.setting.events.values_read, False)
        self._follow_frozen()
        own = {flat: flat.master.values.clone() for flat in self._averages}
        self._set_values(self._averages)
        passes.values_by = f"`with {_APPLIED}:`"
        try:
            yield
        finally:
            passes.values_by = ""
            # A rank may get here by an error that the others did not have.
            meet(f"the end of {_APPLIED}", limit_seconds=engine.core.followed.limit_seconds)
            engine.core.wait_gathers()
            self._set_values(own)

    @torch.no_grad()
    def _set_values(self, values: dict[FlatParams, Tensor]) -> None:
        for flat, value in values.items():
            flat.write_master(value)
        distribute(self._engine.core)

    def of_flat(self, flat: FlatParams) -> Tensor | None:
        """Return the averages of a buffer's parameters, laid out like its master; None if it has none."""
        return self._averages.get(flat)

    def replace_buffer(self, old: FlatParams, new: FlatParams, average: Tensor) -> None:
        """Replace the average of a buffer whose parameters have moved to another buffer."""
        del self._averages[old]
        self._averages[new] = average

    def tensors(self) -> list[Tensor]:
        """Return all averages of this rank, one tensor per buffer."""
        return list(self._averages.values())

    def slices(self) -> dict[nn.Parameter, Tensor]:
        """Return the average of each slice that this rank's optimizer steps and that has one, in the same shape."""
        return {
            part.parameter: average[part.start : part.stop].view(part.parameter.shape)
            for flat, average in self._averages.items()
            for part in flat.master.owned
            if flat.names[part.index] in self._averaged
        }

    def names(self) -> list[str]:
        """Return the full names of all parameters that have an average."""
        return sorted(self._averaged)


def _is_trained(flat: FlatParams) -> bool:
    return bool(_trained(flat))


def _trained(flat: FlatParams) -> set[str]:
    """Return the names of the buffer's parameters that are trained now."""
    named = zip(flat.names, flat.params, strict=True)
    return {name for name, parameter in named if flat.spec.has_gradients and parameter.requires_grad}


def _dtype(flat: FlatParams) -> torch.dtype:
    """Return the dtype of averages: a narrow one would lose small changes."""
    return flat.master_dtype if flat.master_dtype.itemsize >= 4 else torch.float32
