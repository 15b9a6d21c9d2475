"""A unit at work: its module, its flat buffers, and where it stands in the step."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor, nn

from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.core.step_errors import (
    added_to_average,
    frozen_was_written,
    thawed_in_forward,
    thawed_without_master,
)
from shardwise.engine.core.step_events import announce
from shardwise.engine.hooks.step_hooks import UnitGrads
from shardwise.plan.placement import Placement
from shardwise.program import Kind


class Unit:
    """Gather, wait, free: each does nothing where it is done already, so that any order of calls is safe.

    whole      every rank's slice is here, or on its way; `arrived`: here
    at_rest    its parameters, or their gradients, are not to be read
    calls      the numbers in the program of this forward's calls, and in backward, of those of all forwards since the
               last one
    """

    def __init__(
        self, name: str, *, module: nn.Module, placement: Placement, flats: list[FlatParams], setting: CoreSetting
    ) -> None:
        self.name = name
        self.module = module
        self.placement = placement
        self._setting = setting
        gathers = (Kind.GATHER, Kind.GATHER_SLICE)
        self._gathers = {kind: CollectiveName(f"{kind.value} {name}") for kind in gathers}
        self.hold(flats)
        self.whole = True
        self.arrived = True
        self.at_rest = False
        self.calls: list[int] = []
        self._earlier_calls: list[int] = []
        # This backward's gradients; and the parameters, by id, that any backward since the last reduction has used.
        self.grads: UnitGrads[Unit]
        self.used: set[int] = set()
        self.learned_trainable: frozenset[int] = frozenset()
        # The buffers that hold any of the parameters that are trained (see learn_trained).
        self.trained_flats: list[FlatParams] = []
        self._has_warned = False
        self.lend: Callable[[], bool] = bool
        # The parameters, and those that rest between backwards, as they are once the buffers are filled.
        self.settled: list[nn.Parameter] = []
        self._rests: list[nn.Parameter] = []

    def hold(self, flats: list[FlatParams]) -> None:
        """Hold these buffers from now on; `settle` comes next, once they are filled."""
        self.flats = flats
        # Whether there is anything to gather and free.
        self.sharded = self.placement.params.is_sharded and bool(flats)

    def __str__(self) -> str:
        return self.name

    @property
    def updates_parts(self) -> bool:
        """Return whether a rank updates a part of what it holds, so that the rest is gathered after the update."""
        optim = self.placement.optim
        return optim.is_sharded_across or (optim.is_sharded and not self.sharded)

    @property
    def from_root(self) -> bool:
        """Return whether it was taken out of the root, and is read where the root is (spec.UnitSpec)."""
        return self._setting.spec.unit(self.name).from_root

    @property
    def shows_grads(self) -> bool:
        return any(flat.grads.shows for flat in self.flats)

    def listen(self, grads: UnitGrads["Unit"], *, lend: Callable[[], bool] = bool) -> None:
        """Expect gradients here; `lend` makes its parameters readable outside of its forward, or returns False."""
        self.grads, self.lend = grads, lend

    def params(self) -> Iterator[nn.Parameter]:
        return (parameter for flat in self.flats for parameter in flat.params)

    def without(self, names: AbstractSet[str]) -> list[nn.Parameter]:
        """Return the parameters that do not have these names."""
        if not names:
            return self.settled
        return [
            one for flat in self.flats for one, name in zip(flat.params, flat.names, strict=True) if name not in names
        ]

    # The parameters

    def gather(self, *, is_local: bool = False) -> None:
        """Take part in a gather. A rank that does not need it does so too: the others cannot do without it.

        `is_local`: in a group of one rank, whose slice is everything.
        """
        in_use = self.whole and self.arrived
        self._gather(self.flats, is_local=is_local)
        if in_use and self.sharded:
            # Whoever uses it does not ask again.
            self.wait_gather()

    def gather_updated(self, *, is_local: bool = False) -> None:
        """Gather slices that each rank has updated; until all are here, the parameters are not to be read."""
        self._gather(self.trained_flats, is_local=is_local)
        if not self.arrived:
            self._rest(self.settled)

    def _gather(self, flats: list[FlatParams], *, is_local: bool) -> None:
        # All of it or nothing: memory may run out, and then it is unknown what was issued.
        for flat in flats:
            if flat.master.gathering is not None:
                self.wait_gather_slice()
            flat.full.make_room()
        for flat in flats:
            full, group = flat.full, flat.groups.gather
            with full.loading(flat.master):
                full.load(flat.master)
                if not is_local:
                    group.log.name = self._gathers[Kind.GATHER]
                    full.begin(flat.collectives.all_gather(full.buffer, group=group, own=full.own))
        self.whole = True
        # From host memory, even a rank alone waits for its slices.
        self.arrived = is_local and all(flat.master.host is None for flat in self.flats)
        self._setting.tape.record(Kind.GATHER, self.name, partial(_full_bytes, flats))

    def gather_slice(self, *, updated: bool) -> None:
        """Gather this rank's slices, of which each rank of the replicate axis has written a part, in a step if
        `updated`.
        """
        self.wait_gather_slice()
        flats = self.trained_flats if updated else self.flats
        for flat in flats:
            group = flat.groups.replicate
            group.log.name = self._gathers[Kind.GATHER_SLICE]
            flat.master.begin(flat.collectives.all_gather(flat.master.staged, group=group))
        self._setting.tape.record(
            Kind.GATHER_SLICE, self.name, lambda: sum(flat.master.staged.nbytes for flat in flats)
        )

    def wait_gather_slice(self) -> None:
        """Wait for this rank's slices, before they are gathered or written."""
        gathering = [flat.master for flat in self.flats if flat.master.gathering is not None]
        if not gathering:
            return
        for master in gathering:
            master.wait()
        self._setting.tape.record(Kind.WAIT_GATHER_SLICE, self.name)

    def wait_gather(self) -> None:
        if self.arrived or not self.whole:
            return
        for flat in self.flats:
            flat.full.wait()
        self.arrived = True
        self._setting.tape.record(Kind.WAIT_GATHER, self.name)

    def wake(self) -> None:
        """Allow reads of its parameters: it is gathered."""
        self.at_rest = False
        announce(self._setting.events.unit_wakes, self)

    def _rest(self, parameters: Sequence[nn.Parameter]) -> None:
        self.at_rest = True
        announce(self._setting.events.unit_rests, self, parameters)

    def free(self) -> None:
        """Give the gathered parameters' memory back, where they are sharded."""
        if not self.sharded or not self.whole:
            return
        for flat in self.flats:
            flat.full.free()
        self.whole = self.arrived = False
        self._rest(self.settled)
        self._setting.tape.record(Kind.FREE, self.name, partial(_full_bytes, self.flats))

    def free_unused(self) -> None:
        """Free it if this step has not called it."""
        if not self.calls:
            self.free()

    def begin_update(self) -> None:
        """Look for writes to frozen parameters whose gradients were not cleared: fused kernels count none."""
        for flat in self.flats:
            if flat not in self.trained_flats and flat.spec.has_gradients and flat.master.has_grads:
                flat.master.writes.lend()

    def updated(self) -> list[FlatParams]:
        """Free what an update has made old. Slices of replicated parameters are gathered next.

        Returns the buffers of which this rank has the whole master, to be refreshed with those of other units.
        """
        # An optimizer may step what is frozen by now, if its gradient was not cleared.
        written = [flat for flat in self.flats if flat not in self.trained_flats and flat.master.writes.found]
        stepped = [*self.trained_flats, *written]
        for flat in stepped:
            flat.master.stage()
        if not self.placement.optim.is_sharded:
            return stepped
        if self.sharded:
            self.free()
        if written and self.updates_parts:
            raise frozen_was_written(written[0].names[0])
        return []

    def settle(self) -> None:
        """Become as a step finds it, once the buffers are filled: free what is sharded."""
        self.settled = list(self.params())
        self._learn_trained({id(parameter) for parameter in self.settled if parameter.requires_grad})
        # Their gradients are sharded, or they are copies of a master.
        resting = [flat for flat in self.flats if not flat.grads.shows or flat.compute_dtype != flat.master_dtype]
        self._rests = [parameter for flat in resting for parameter in flat.params]
        for flat in self.flats:
            flat.master.stage()
        self.whole = self.arrived = not self.sharded
        announce(self._setting.events.unit_settled, self)
        if self._rests:
            self._rest(self.settled)

    def warn_unannounced(self) -> None:
        """Warn once that it will not be known when backward comes to it."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.name} returns an object in which no tensor can be found, so its parameters stay gathered until "
                "backward is over: return tensors, or tuples, dicts or dataclasses of them",
                stacklevel=3,
            )

    # The step

    @property
    def last_call(self) -> int:
        return self.calls[-1] if self.calls else -1

    def note_call(self, call: int) -> None:
        """Note a call of this forward by its number in the program."""
        self.calls.append(call)

    def note_used(self, parameters: AbstractSet[int]) -> None:
        """Note the parameters, by id, that this backward has used."""
        self.used |= parameters

    def begin(self, *, continues: bool) -> None:
        """Begin a forward: hook parameters that were thawed, forget gradients that were cleared.

        `continues`: a backward may go through an earlier forward as well.
        """
        self._earlier_calls = [*self._earlier_calls, *self.calls] if continues else []
        self.calls = []
        before = self.grads.expected
        with unguarded():
            self.grads.expect(self.settled)
            for flat in self.flats:
                flat.grads.drop_stale()
        if self.grads.expected != before:
            for flat in self.flats:
                self._check_thawed(flat)
                for part in flat.master.owned:
                    part.parameter.requires_grad_(self.is_trainable(flat, part.index))

    def _check_thawed(self, flat: FlatParams) -> None:
        for index, name in enumerate(flat.names):
            if flat.spec.unstepped and self.is_trainable(flat, index):
                raise thawed_without_master(name, dtype=flat.master_dtype)

    @property
    def used_all(self) -> bool:
        return len(self.used) == len(self.grads.expected)

    @property
    def partly_frozen(self) -> bool:
        """Then its last gradient does not tell that backward is done with its parameters."""
        return len(self.grads.expected) < len(self.settled)

    def learn_trained(self, trained: frozenset[int] | None = None) -> set[str]:
        """Learn which parameters are trained now; return their names. Only their buffers are reduced and updated.

        `trained`: what was trained when another unit of the same parameters learned it.
        """
        self.learned_trainable = self.grads.expected if trained is None else trained
        self._learn_trained(self.learned_trainable)
        return {
            name
            for flat in self.flats
            for parameter, name in zip(flat.params, flat.names, strict=True)
            if id(parameter) in self.learned_trainable
        }

    def resume(self, before: "Unit") -> set[str]:
        """Continue where another unit of the same parameters has stopped; return the names of those trained now."""
        self.used |= before.used
        return self.learn_trained(before.learned_trainable)

    def _learn_trained(self, trained: AbstractSet[int]) -> None:
        self.trained_flats = [
            flat for flat in self.flats if flat.spec.has_gradients and any(id(one) in trained for one in flat.params)
        ]

    def is_trainable(self, flat: FlatParams, index: int) -> bool:
        return id(flat.params[index]) in self.grads.expected

    def begin_backward(self) -> None:
        self.calls = [*self._earlier_calls, *self.calls]
        self._earlier_calls = []
        for flat in self.flats:
            flat.grads.hide()

    def check_first_grad(self, parameter: Tensor) -> None:
        """Before a backward that begins with this parameter's gradient: was it added to an average?"""
        for flat in self.flats:
            for index, name in enumerate(flat.names):
                if flat.params[index] is parameter and flat.grads.shows_average(index):
                    raise added_to_average(name)

    def end_backward(self) -> None:
        """Free it. `p.grad` answers with an error where gradients are sharded."""
        self.free()
        if self._rests and not self.at_rest:
            self._rest(self._rests)

    def restore_grads(self) -> None:
        """Restore earlier averages where backward brought none."""
        for flat in self.flats:
            if flat not in self.trained_flats:
                self._check_no_grads(flat)
            flat.grads.restore()

    def _check_no_grads(self, flat: FlatParams) -> None:
        """Raise if a parameter got a gradient whose buffer is not reduced."""
        with unguarded():
            for parameter, name in zip(flat.params, flat.names, strict=True):
                if parameter.grad is not None:
                    raise thawed_in_forward(name)

    def undo_grads(self) -> None:
        """Restore the gradients from before a backward that raised."""
        self.used.clear()
        for flat in self.flats:
            flat.grads.undo()

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Somebody clears the gradients of these parameters; with `drop`, also those that are reduced."""
        for flat in self.flats:
            cleared = flat.indices_of(names)
            flat.grads.clear(cleared, drop=drop)
            if self.used:
                self.used.difference_update([id(flat.params[index]) for index in cleared])


def _full_bytes(flats: list[FlatParams]) -> int:
    return sum(flat.full.num_bytes for flat in flats)
