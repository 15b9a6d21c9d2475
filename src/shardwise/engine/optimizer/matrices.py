"""Matrices that one rank owns: an optimizer that needs unsharded parameters steps them there.

Parameters, gradients and masters are in slices as usual. A rank owns the optimizer's state of some matrices:

    to owners     before an update, the slices of a matrix and of its gradient go to the rank that owns it
    update        the optimizer steps the unsharded matrix there
    from owners   its new values go back into the slices

Each is an all-to-all per unit over the shard axis. Between two updates the owner holds only the state of a matrix:
reading the parameter in the optimizer's groups then raises an error.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.parameters import parameter_like, unguarded
from shardwise.engine.core.step_errors import frozen_has_gradient
from shardwise.engine.core.unit import Unit
from shardwise.engine.guards.guard import ShardedParameter, rest, wake
from shardwise.program import Kind, Operation
from shardwise.program.owners import assign_owners


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrix:
    """A parameter whose optimizer state lives on one rank.

    owner       its place in the shard axis
    unsharded   the parameter that the optimizer steps; None on other ranks
    """

    name: str
    unit: Unit
    flat: FlatParams
    index: int
    owner: int
    unsharded: nn.Parameter | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.flat.layout.shapes[self.index]

    def part_of(self, rank: int) -> tuple[int, int]:
        """Return the start and stop, counted from its first element, of its part in a rank's slice."""
        size = self.flat.layout.slice_elements
        offset = self.flat.layout.offsets[self.index]
        start, stop = rank * size - offset, (rank + 1) * size - offset
        return max(start, 0), max(min(stop, prod(self.shape)), max(start, 0))

    def size_on(self, rank: int) -> int:
        start, stop = self.part_of(rank)
        return stop - start


class OwnedMatrices:
    """All owned matrices of a model, by the optimizer that steps them."""

    def __init__(self, core: Core) -> None:
        self._units = core.units
        self._tape = core.setting.tape
        core.executor.add(Kind.TO_OWNERS, lambda operation: partial(self.to_owners, operation))
        core.executor.add(Kind.FROM_OWNERS, lambda operation: partial(self.from_owners, operation))
        self._of: weakref.WeakKeyDictionary[Optimizer, list[OwnedMatrix]] = weakref.WeakKeyDictionary()
        self._stepping: list[OwnedMatrix] = []
        self._to = {name: CollectiveName(f"{Kind.TO_OWNERS.value} {name}") for name in self._units}
        self._from = {name: CollectiveName(f"{Kind.FROM_OWNERS.value} {name}") for name in self._units}

    def of(self, optimizer: Optimizer | None) -> list[OwnedMatrix]:
        """Return the matrices that an optimizer steps; without one, all."""
        if optimizer is None:
            return [matrix for matrices in self._of.values() for matrix in matrices]
        return self._of.get(optimizer, [])

    def own(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Assign owners to these parameters, which the optimizer steps from now on."""
        places = {
            name: (unit, flat, index)
            for unit in self._units.values()
            for flat in unit.flats
            for index, name in enumerate(flat.names)
        }
        found = [(name, *places[name]) for name in names if prod(places[name][1].layout.shapes[places[name][2]])]
        if not found:
            return
        group = found[0][2].groups.gather
        shapes = [flat.layout.shapes[index] for _, _, flat, index in found]
        owners = assign_owners(shapes, num_ranks=group.size, loads=self._loads(group.size))
        self._of[optimizer] = [*self.of(optimizer)]
        for (name, unit, flat, index), owner in zip(found, owners, strict=True):
            unsharded = _at_rest(flat, index, name=name) if owner == group.index else None
            matrix = OwnedMatrix(name=name, unit=unit, flat=flat, index=index, owner=owner, unsharded=unsharded)
            self._of[optimizer].append(matrix)

    def _loads(self, num_ranks: int) -> list[int]:
        loads = [0] * num_ranks
        for matrix in self.of(None):
            loads[matrix.owner] += prod(matrix.shape)
        return loads

    def begin_step(self, optimizer: Optimizer) -> None:
        """Prepare an update of this optimizer: those of its matrices that have a gradient move."""
        self._stepping = [matrix for matrix in self.of(optimizer) if matrix.flat.grads.has(matrix.index)]
        for matrix in self._stepping:
            if matrix.flat not in matrix.unit.trained_flats:
                # The program moves nothing of it to its owner.
                raise frozen_has_gradient(matrix.name)

    def slices(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return this rank's slices of an optimizer's matrices; they have the gradients between updates."""
        return [
            part.parameter
            for matrix in self.of(optimizer)
            for part in matrix.flat.master.owned
            if part.index == matrix.index
        ]

    def zero_grads(self, optimizer: Optimizer) -> None:
        """Fill the gradients in the slices of an optimizer's matrices with zeros."""
        for parameter in self.slices(optimizer):
            if parameter.grad is not None:
                parameter.grad.zero_()

    def _moving(self, unit: str) -> Iterator[list[OwnedMatrix]]:
        """Yield the matrices of a unit that move, those of one buffer together."""
        flats = self._units[unit].flats
        moving = ([matrix for matrix in self._stepping if matrix.flat is flat] for flat in flats)
        return (matrices for matrices in moving if matrices)

    @torch.no_grad()
    def to_owners(self, operation: Operation) -> None:
        """Send the slices of a unit's matrices and of their gradients to the owners."""
        unit, num_bytes = operation.subject, 0
        for matrices in self._moving(unit):
            num_bytes += 2 * _num_bytes(matrices)
            exchange = _Exchange(matrices, tensors_each=2, is_local=operation.is_local)
            received = exchange.send_slices(name=self._to[unit])
            for matrix, (values, grads) in received:
                assert matrix.unsharded is not None
                wake([matrix.unsharded])
                matrix.unsharded.data = values.view(matrix.shape)
                matrix.unsharded.grad = grads.view(matrix.shape)
        if num_bytes:
            self._tape.record(Kind.TO_OWNERS, unit, lambda: num_bytes)

    @torch.no_grad()
    def from_owners(self, operation: Operation) -> None:
        """Send the new values of a unit's matrices back into the slices."""
        unit, num_bytes = operation.subject, 0
        for matrices in self._moving(unit):
            num_bytes += _num_bytes(matrices)
            _Exchange(matrices, tensors_each=1, is_local=operation.is_local).return_slices(name=self._from[unit])
            for matrix in matrices:
                if matrix.unsharded is not None:
                    _put_to_rest(matrix.unsharded)
        if num_bytes:
            self._tape.record(Kind.FROM_OWNERS, unit, lambda: num_bytes)


class _Exchange:
    """One all-to-all of the matrices of one flat buffer, and its split sizes."""

    def __init__(self, matrices: list[OwnedMatrix], *, tensors_each: int, is_local: bool) -> None:
        self._is_local = is_local
        self._matrices = matrices
        self._flat = matrices[0].flat
        self._group = self._flat.groups.gather
        self._here = self._group.index
        self._mine = [matrix for matrix in matrices if matrix.owner == self._here]
        ranks = range(self._group.size)
        # Elements of each owner's matrices in this rank's slice, and of this rank's matrices in each rank's slice.
        self._by_owner = [
            tensors_each * sum(m.size_on(self._here) for m in matrices if m.owner == rank) for rank in ranks
        ]
        self._by_slice = [tensors_each * sum(m.size_on(rank) for m in self._mine) for rank in ranks]

    def send_slices(self, *, name: CollectiveName) -> Iterator[tuple[OwnedMatrix, list[Tensor]]]:
        """Send slices to the owners; return this rank's matrices, each with its flat values and gradient."""
        parts = {part.index: part for part in self._flat.master.owned}
        pieces: list[Tensor] = []
        for matrix in sorted(self._matrices, key=lambda matrix: matrix.owner):
            if matrix.index in parts:
                part = parts[matrix.index]
                grad = part.parameter.grad
                assert grad is not None
                pieces += [self._flat.master.values[part.start : part.stop], grad.reshape(-1)]
        received = self._move(pieces, sizes=self._by_owner, received_sizes=self._by_slice, name=name)
        cut = self._cut(received, tensors_each=2)
        return ((matrix, [torch.cat(ranks) for ranks in zip(*cut[matrix.name], strict=True)]) for matrix in self._mine)

    def return_slices(self, *, name: CollectiveName) -> None:
        pieces = []
        for rank in range(self._group.size):
            for matrix in self._mine:
                assert matrix.unsharded is not None
                start, stop = matrix.part_of(rank)
                pieces.append(matrix.unsharded.detach().reshape(-1)[start:stop])
        received = self._move(pieces, sizes=self._by_slice, received_sizes=self._by_owner, name=name)
        parts = {part.index: part for part in self._flat.master.owned}
        held = [m for m in sorted(self._matrices, key=lambda matrix: matrix.owner) if m.index in parts]
        targets = [self._flat.master.values[parts[m.index].start : parts[m.index].stop] for m in held]
        if targets:
            torch._foreach_copy_(targets, list(torch.split(received, [target.numel() for target in targets])))

    def _move(
        self, pieces: list[Tensor], *, sizes: list[int], received_sizes: list[int], name: CollectiveName
    ) -> Tensor:
        nothing = torch.empty(0, dtype=self._flat.master_dtype, device=self._flat.device)
        sent = torch.cat([nothing, *pieces])
        if self._is_local:
            return sent
        received = nothing.new_empty(sum(received_sizes))
        self._group.log.name = name
        self._flat.collectives.all_to_all(
            received, sent, received_sizes=received_sizes, sent_sizes=sizes, group=self._group
        ).wait()
        return received

    def _cut(self, received: Tensor, *, tensors_each: int) -> dict[str, list[tuple[Tensor, ...]]]:
        """Return, by name of a matrix, the parts of its tensors from each rank."""
        places = [(m, rank) for rank in range(self._group.size) for m in self._mine]
        sizes = [m.size_on(rank) for m, rank in places for _ in range(tensors_each)]
        pieces = torch.split(received, sizes)
        found: dict[str, list[tuple[Tensor, ...]]] = {}
        for (matrix, _), start in zip(places, range(0, len(pieces), tensors_each), strict=True):
            found.setdefault(matrix.name, []).append(pieces[start : start + tensors_each])
        return found


def _num_bytes(matrices: Sequence[OwnedMatrix]) -> int:
    return sum(prod(matrix.shape) * matrix.flat.master_dtype.itemsize for matrix in matrices)


def _at_rest(flat: FlatParams, index: int, *, name: str) -> nn.Parameter:
    """Return a parameter of the matrix's shape without memory, for the optimizer's group between updates."""
    shape = flat.layout.shapes[index]
    unsharded = parameter_like(
        flat.params[index], torch.zeros((), dtype=flat.master_dtype, device=flat.device).expand(shape)
    )
    unsharded.__dict__ = dict(vars(unsharded))
    unsharded._touched = partial(_refuse, name)  # type: ignore[attr-defined]
    unsharded._drop_grad = lambda: None  # type: ignore[attr-defined]
    rest([unsharded])
    return unsharded


def _put_to_rest(unsharded: nn.Parameter) -> None:
    with unguarded():
        unsharded.grad = None
        unsharded.data = torch.zeros((), dtype=unsharded.dtype, device=unsharded.device).expand(unsharded.shape)
    rest([unsharded])


def _refuse(name: str, is_grad: bool) -> None:
    """Refuse to read a matrix between two updates."""
    if is_grad:
        return
    raise ShardedParameter(
        f"{name} is whole on this rank, which owns its optimizer state, during optimizer.step() alone: for its values "
        "call shardwise.full_state_dict(model), or read it inside `with shardwise.whole(model):`, on every rank"
    )
