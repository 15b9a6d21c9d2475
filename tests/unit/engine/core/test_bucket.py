"""Gradients on their way through a bucket: taken, kept, summed over two ranks in one process, handed to their owners."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.peers import Peers, setting_of
from torch import Tensor, nn

from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.segment import Segment
from shardwise.engine.core.unit import Unit
from shardwise.engine.hooks.step_hooks import UnitGrads
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program import Bucket
from shardwise.program.buffers import flat_specs
from shardwise.program.spec import TensorSpec, UnitSpec

SHAPES = ((5, 3), (40,))
TWO_RANKS = Mesh(shard=2)
each_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES))


class Rank:
    """One rank's bucket of some units, each with a matrix and a vector."""

    def __init__(self, peers: Peers, *, rank: int, mesh: Mesh, plan: Plan, units: tuple[str, ...]) -> None:
        setting = setting_of(mesh, rank=rank, peers=peers, plan=plan)
        self.collectives = setting.collectives
        self.passes, self.tape = setting.passes, setting.tape
        self.tape.recording = True
        placement = STRATEGIES[plan.strategy]
        self.units: list[Unit] = []
        for name in units:
            params = tuple(TensorSpec(name=f"{name}.{i}", shape=shape) for i, shape in enumerate(SHAPES))
            flats = [
                FlatParams(
                    [nn.Parameter(torch.zeros(shape)) for shape in SHAPES],
                    spec=spec,
                    placement=placement,
                    setting=setting,
                    host=None,
                )
                for spec in flat_specs(UnitSpec(name=name, class_name="Block", params=params), plan=plan)
            ]
            for flat in flats:
                flat.lay_out()
                flat.full.buffer.untyped_storage().resize_(flat.full.num_bytes)
                for index, parameter in enumerate(flat.params):
                    flat.attach(index, parameter)
            unit = Unit(name, module=nn.Identity(), placement=placement, flats=flats, setting=setting)
            unit.listen(UnitGrads(unit, hooks=SimpleNamespace(handles=[])))  # type: ignore[arg-type]
            unit.grads.expect([parameter for flat in flats for parameter in flat.params])
            unit.grads.closed = False
            unit.trained_flats = flats
            self.units.append(unit)
        self.bucket = ReduceBucket(
            Bucket(name="+".join(units), units=units, num_bytes=0),
            units=self.units,
            setting=setting,
        )

    def backward(self, *values: float | None) -> None:
        """Gradients of these values, parameter by parameter and around again; None: it was not used."""
        for unit in self.units:
            for flat in unit.flats:
                flat.grads.hide()
                for index, parameter in enumerate(flat.params):
                    value = values[index % len(values)]
                    if value is not None:
                        parameter.grad = torch.full_like(parameter, value)
            self.bucket.take_grads(unit)

    def grads(self) -> dict[str, set[float]]:
        """Parameter → the values in its owned part's gradient."""
        return {
            flat.names[part.index]: set(part.parameter.grad.flatten().tolist())
            for unit in self.units
            for flat in unit.flats
            for part in flat.master.owned
            if part.parameter.grad is not None
        }

    def all_values(self) -> set[float]:
        return {value for values in self.grads().values() for value in values}


def ranks_of(strategy: str, *, mesh: Mesh = TWO_RANKS, units: tuple[str, ...] = ("a",), **settings: Any) -> list[Rank]:
    plan = Plan(strategy=strategy, **settings)
    peers = Peers(mesh.num_ranks)
    return [Rank(peers, rank=rank, mesh=mesh, plan=plan, units=units) for rank in range(mesh.num_ranks)]


def reduce(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.bucket.start()
    for rank in ranks:
        rank.bucket.finish()
    if ranks[0].bucket.crosses:
        for rank in ranks:
            rank.bucket.start_slice()
        for rank in ranks:
            rank.bucket.finish_slice()


def keep(ranks: list[Rank]) -> None:
    for rank in ranks:
        for segment in rank.bucket.segments:
            segment.keep()


def holds(rank: Rank) -> bool:
    return any(segment.holds for segment in rank.bucket.segments)


def forget(rank: Rank, names: set[str]) -> None:
    for segment in rank.bucket.segments:
        segment.forget(names)


def drop(rank: Rank) -> None:
    for segment in rank.bucket.segments:
        segment.drop()


# One pass


@each_strategy
def test_gradients_are_averaged_over_the_ranks(strategy: str) -> None:
    ranks = ranks_of(strategy, units=("a", "b") if strategy in ("ddp", "zero1") else ("a",))
    for rank, value in zip(ranks, (1.0, 4.0), strict=True):
        rank.backward(value)
    reduce(ranks)
    for rank in ranks:
        assert rank.all_values() == {2.5}


@each_strategy
def test_a_rank_that_did_not_use_a_parameter_counts_as_zero(strategy: str) -> None:
    ranks = ranks_of(strategy)
    ranks[0].backward(2.0, 2.0)
    ranks[1].backward(None, 6.0)
    reduce(ranks)
    found: dict[str, set[float]] = {}
    for rank in ranks:
        for name, values in rank.grads().items():
            found.setdefault(name, set()).update(values)
    assert found == {"a.0": {1.0}, "a.1": {4.0}}


@each_strategy
def test_what_is_taken_leaves_no_gradient_behind_and_closes_the_unit(strategy: str) -> None:
    (rank,) = ranks_of(strategy, mesh=Mesh())
    rank.backward(1.0)
    (unit,) = rank.units
    assert unit.grads.closed
    assert all(parameter.grad is None for parameter in unit.params())
    assert unit.used == {id(parameter) for parameter in unit.params()}


@each_strategy
def test_a_later_reduction_adds_to_the_gradients_that_are_there(strategy: str) -> None:
    ranks = ranks_of(strategy)
    for value in (1.0, 2.0, 3.0):
        for rank in ranks:
            rank.backward(value)
        reduce(ranks)
    assert ranks[0].all_values() == {6.0}


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_slice_is_summed_over_the_second_axis_of_the_mesh(strategy: str) -> None:
    ranks = ranks_of(strategy, mesh=Mesh(replicate=2, shard=2))
    for number, rank in enumerate(ranks):
        rank.backward(float(number))
    reduce(ranks)
    for rank in ranks:
        assert rank.all_values() == {1.5}
        assert rank.collectives.issued == ["reduce_scatter", "all_reduce"]
        assert rank.bucket.segments[0].buffer is None


def test_replicated_gradients_of_several_units_are_one_collective_and_sharded_ones_one_each() -> None:
    for strategy, issued in (("ddp", ["all_reduce"]), ("zero2", ["reduce_scatter"] * 2)):
        ranks = ranks_of(strategy, units=("a", "b"))
        for rank in ranks:
            rank.backward(1.0)
        reduce(ranks)
        assert ranks[0].collectives.issued == issued


def test_narrow_gradients_are_summed_in_the_reduce_dtype() -> None:
    ranks = ranks_of("zero2", precision="bf16")
    for rank, value in zip(ranks, (1.0, 2**-9), strict=True):
        rank.backward(value)
    reduce(ranks)
    # In bf16 the sum would be 1.
    assert ranks[0].all_values() == {(1 + 2**-9) / 2}


def test_the_tape_says_what_was_done() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    rank.backward(1.0)
    reduce([rank])
    entries = rank.tape.take()
    assert [str(entry) for entry in entries] == ["take grads a", "reduce a", "wait reduce a"]
    # 15 and 40 elements, each rounded up to 32.
    assert entries[1].num_bytes == 4 * 96


# Several passes


@each_strategy
def test_passes_that_are_kept_add_up_and_are_reduced_once(strategy: str) -> None:
    ranks = ranks_of(strategy)
    for value in (1.0, 2.0):
        for rank in ranks:
            rank.backward(value)
        keep(ranks)
        assert all(holds(rank) for rank in ranks)
    ranks[0].backward(3.0)
    ranks[1].backward(5.0)
    reduce(ranks)
    for rank in ranks:
        assert rank.all_values() == {(6.0 + 8.0) / 2}
        assert len(rank.collectives.issued) == 1
        assert not holds(rank)


def test_a_pass_that_did_not_use_a_parameter_leaves_what_was_kept_of_it() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    rank.backward(1.0, 1.0)
    keep([rank])
    rank.backward(None, 2.0)
    reduce([rank])
    assert rank.grads() == {"a.0": {1.0}, "a.1": {3.0}}


def test_what_was_used_in_any_pass_is_used() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    (unit,) = rank.units
    rank.backward(None, 1.0)
    keep([rank])
    assert unit.used == {id(parameter) for flat in unit.flats for parameter in flat.params[1::2]}
    rank.backward(1.0, None)
    assert unit.used_all


def test_narrow_gradients_add_up_in_the_reduce_dtype() -> None:
    (rank,) = ranks_of("fsdp", mesh=Mesh(), precision="bf16")
    for value in (1.0, 2**-9, 2**-9):
        rank.backward(value)
        keep([rank])
    rank.backward(0.0)
    reduce([rank])
    assert rank.all_values() == {1 + 2**-8}


# Weights


def test_the_average_is_over_the_ranks_that_count() -> None:
    ranks = ranks_of("zero2")
    ranks[1].passes.counts = False
    for rank, value in zip(ranks, (3.0, 100.0), strict=True):
        rank.passes.num_counting = 1
        rank.backward(value)
    reduce(ranks)
    for rank in ranks:
        assert rank.all_values() == {3.0}
    assert not ranks[1].units[0].used


@pytest.mark.parametrize("kept_before", [False, True])
@each_strategy
def test_a_gradient_of_weight_0_is_not_let_in_even_as_nan(strategy: str, kept_before: bool) -> None:
    ranks = ranks_of(strategy)
    if kept_before:
        for rank in ranks:
            rank.backward(1.0)
        keep(ranks)
    ranks[1].passes.counts = False
    for rank, value in zip(ranks, (2.0, torch.nan), strict=True):
        rank.passes.num_counting = 1
        rank.backward(value)
    reduce(ranks)
    for rank in ranks:
        assert rank.all_values() == {3.0 if kept_before else 2.0}


# Clearing


def test_what_is_forgotten_by_name_is_zero_and_the_rest_stays() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    rank.backward(1.0, 2.0)
    keep([rank])
    forget(rank, {"a.0"})
    assert holds(rank)
    rank.backward(10.0, 10.0)
    reduce([rank])
    assert rank.grads() == {"a.0": {10.0}, "a.1": {12.0}}


@each_strategy
def test_when_all_is_forgotten_the_buffer_goes(strategy: str) -> None:
    (rank,) = ranks_of(strategy, mesh=Mesh())
    rank.backward(1.0)
    keep([rank])
    forget(rank, {"a.0", "a.1", "another.0"})
    assert not holds(rank)
    assert rank.bucket.segments[0].buffer is None
    rank.backward(5.0)
    reduce([rank])
    assert rank.all_values() == {5.0}


def test_what_is_not_kept_is_not_forgotten() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    rank.backward(1.0)
    forget(rank, {"a.0", "a.1"})
    reduce([rank])
    assert rank.all_values() == {1.0}


@each_strategy
def test_what_a_backward_that_raised_left_under_way_is_waited_for_and_dropped(strategy: str) -> None:
    ranks = ranks_of(strategy)
    for rank in ranks:
        rank.backward(torch.nan)
        rank.bucket.start()
    for rank in ranks:
        drop(rank)
        (segment,) = rank.bucket.segments
        assert segment.work is None
        assert segment.buffer is None
    for rank in ranks:
        rank.backward(2.0)
    reduce(ranks)
    assert ranks[0].all_values() == {2.0}


def test_what_earlier_passes_kept_is_not_dropped() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    rank.backward(1.0)
    keep([rank])
    drop(rank)
    rank.backward(2.0)
    reduce([rank])
    assert rank.all_values() == {3.0}


# The buffer from step to step


def pointer(segment: Segment) -> int:
    assert segment.kept is not None
    return segment.kept.data_ptr()


def test_a_buffer_is_used_again_when_no_gradient_lies_in_it_any_more() -> None:
    (rank,) = ranks_of("ddp", mesh=Mesh())
    (segment,) = rank.bucket.segments
    pointers = []
    for value in (1.0, 2.0):
        rank.backward(value)
        reduce([rank])
        pointers.append(pointer(segment))
        assert rank.all_values() == {value}
        for parameter in rank.units[0].params():
            parameter.grad = None
    assert pointers[0] == pointers[1]


def test_a_gradient_that_somebody_holds_is_not_written_over() -> None:
    (rank,) = ranks_of("ddp", mesh=Mesh())
    rank.backward(1.0)
    reduce([rank])
    (flat,) = rank.units[0].flats
    held: list[Tensor | None] = [parameter.grad for parameter in flat.params]
    for parameter in flat.params:
        parameter.grad = None
    rank.backward(2.0)
    reduce([rank])
    assert rank.all_values() == {2.0}
    assert held[0] is not None
    assert set(held[0].flatten().tolist()) == {1.0}


def test_sparse_gradients_are_taken_dense() -> None:
    (rank,) = ranks_of("zero2", mesh=Mesh())
    (unit,) = rank.units
    matrix = next(unit.params())
    unit.flats[0].grads.hide()
    rows, values = torch.tensor([[1]]), torch.full((1, 3), 7.0)
    matrix.grad = torch.sparse_coo_tensor(rows, values, (5, 3), check_invariants=True)
    rank.bucket.take_grads(unit)
    reduce([rank])
    gradient = unit.flats[0].master.owned[0].parameter.grad
    assert gradient is not None
    assert gradient.view(5, 3).sum(1).tolist() == [0.0, 21.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "fsdp"])
def test_a_sharded_buffer_gives_its_memory_back_and_its_views_serve_the_next_step(strategy: str) -> None:
    ranks = ranks_of(strategy)
    (segment,) = ranks[0].bucket.segments
    (flat,) = segment.flats
    seen: list[Tensor] = []
    for value in (1.0, 3.0):
        for rank in ranks:
            rank.backward(value)
        assert segment.buffer is not None
        seen.append(segment.views(flat)[0])
        buffer = segment.buffer
        reduce(ranks)
        assert buffer.untyped_storage().nbytes() == 0
        assert segment.buffer is None
        assert ranks[0].all_values() == {value}
        for rank in ranks:
            for unit in rank.units:
                for own in unit.flats:
                    own.grads.drop(range(len(own.params)))
    assert seen[0] is seen[1]
