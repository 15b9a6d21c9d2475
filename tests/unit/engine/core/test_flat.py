"""Flat buffers of two ranks in one process: what is a view of what, what is owned, and where gradients are shown."""

import pytest
import torch
from engine.peers import Peers, setting_of
from torch import Tensor, nn

from shardwise.engine.core.flat import FlatParams, refresh
from shardwise.engine.offload.transfer import HostCopies
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, Mesh
from shardwise.program.buffers import flat_specs
from shardwise.program.spec import ROOT, TensorSpec, UnitSpec

# The second lies across the two ranks' slices, the last is empty.
SHAPES = ((10, 3), (60,), (5,), (0, 4))
each_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES))
sharded = pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])


def values() -> list[Tensor]:
    """Each element another number, none of them 0."""
    numbers = iter(range(1, 1000))
    return [torch.tensor([float(next(numbers)) for _ in range(torch.Size(s).numel())]).view(s) for s in SHAPES]


def make(
    strategy: str, *, num_ranks: int = 2, precision: str = "fp32", offloads: bool = False
) -> tuple[list[FlatParams], list[list[nn.Parameter]]]:
    """Each rank's buffers, filled with `values()`, and its module's parameters."""
    params = tuple(TensorSpec(name=f"p{index}", shape=shape) for index, shape in enumerate(SHAPES))
    (spec,) = flat_specs(UnitSpec(name=ROOT, class_name="Net", params=params), plan=Plan(precision=precision))
    peers = Peers(num_ranks)
    cpu = torch.device("cpu")
    flats, parameters = [], []
    for rank in range(num_ranks):
        own = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        flat = FlatParams(
            list(own),
            spec=spec,
            placement=STRATEGIES[strategy],
            setting=setting_of(Mesh(shard=num_ranks), rank=rank, peers=peers, plan=Plan(precision=precision)),
            host=HostCopies(cpu, keeps_grads=False) if offloads else None,
        )
        # Masters of sharded parameters are there before any full buffer is.
        assert flat.master.values.numel()
        assert (flat.full.buffer.numel() == 0) == (STRATEGIES[strategy].params is SHARDED)
        flat.lay_out()
        for index, value in enumerate(values()):
            flat.fill(index, value)
            flat.attach(index, own[index])
        flat.master.stage()
        flats.append(flat)
        parameters.append(own)
    return flats, parameters


def start_gather(flat: FlatParams) -> None:
    """As a unit does it."""
    flat.full.make_room()
    flat.full.load(flat.master)
    flat.full.begin(flat.collectives.all_gather(flat.full.buffer, group=flat.groups.gather, own=flat.full.own))


def gather(flats: list[FlatParams]) -> None:
    for flat in flats:
        start_gather(flat)
    for flat in flats:
        flat.full.wait()


def assert_values(parameters: list[nn.Parameter], *, times: float = 1.0) -> None:
    for parameter, value in zip(parameters, values(), strict=True):
        assert torch.equal(parameter.detach(), (times * value).to(parameter.dtype))


# Gather and free


@sharded
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_is_gathered_is_what_was_filled(strategy: str, num_ranks: int) -> None:
    flats, parameters = make(strategy, num_ranks=num_ranks)
    gather(flats)
    for own in parameters:
        assert_values(own)


@sharded
def test_a_sharded_buffer_begins_freed(strategy: str) -> None:
    for flat in make(strategy)[0]:
        assert not flat.full.whole
        assert flat.full.buffer.untyped_storage().nbytes() == 0
        assert flat.master.values.numel() == flat.layout.slice_elements


@sharded
def test_views_that_were_made_before_a_free_are_valid_after_the_next_gather(strategy: str) -> None:
    flats, parameters = make(strategy)
    gather(flats)
    view = parameters[0][0].detach()[2:4]
    rows = view.clone()
    flats[0].full.free()
    assert flats[0].full.buffer.untyped_storage().nbytes() == 0
    assert view.shape == (2, 3)
    flats[1].full.free()
    gather(flats)
    assert torch.equal(view, rows)


@sharded
def test_what_autograd_saved_is_valid_after_a_free_and_a_gather(strategy: str) -> None:
    flats, parameters = make(strategy)
    gather(flats)
    inputs = torch.ones(2, 3, requires_grad=True)
    output = nn.functional.linear(inputs, parameters[0][0])
    flats[0].full.free()
    flats[1].full.free()
    gather(flats)
    output.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, values()[0].sum(0).expand(2, 3))


@sharded
def test_a_free_waits_for_the_gather_that_is_under_way(strategy: str) -> None:
    flats, _ = make(strategy)
    for flat in flats:
        start_gather(flat)
    for flat in flats:
        flat.full.free()
        assert flat.full.gathering is None
        assert not flat.full.whole


def test_until_it_is_waited_for_a_gather_is_not_there() -> None:
    flats, parameters = make("fsdp")
    for flat in flats:
        start_gather(flat)
    assert parameters[0][0].isnan().all()
    flats[0].full.wait()
    assert_values(parameters[0])
    # A second wait has nothing to wait for.
    flats[0].full.wait()


def test_parameters_of_bf16_are_gathered_from_a_master_of_fp32() -> None:
    flats, parameters = make("fsdp", precision="bf16")
    gather(flats)
    assert flats[0].master.values.dtype == torch.float32
    assert flats[0].full.buffer.dtype == torch.bfloat16
    assert_values(parameters[0])


# The master


@pytest.mark.parametrize(
    ("strategy", "precision", "is_aliased", "is_whole"),
    [
        ("ddp", "fp32", True, True),
        ("zero1", "fp32", True, False),
        ("zero2", "fp32", True, False),
        ("shard_grad_op", "fp32", False, False),
        ("fsdp", "fp32", False, False),
        # Another dtype is another memory.
        ("ddp", "bf16", False, True),
        ("zero2", "bf16", False, False),
    ],
)
def test_the_master_is_the_full_buffer_where_it_can_be(
    strategy: str, precision: str, is_aliased: bool, is_whole: bool
) -> None:
    for flat in make(strategy, precision=precision)[0]:
        assert flat.master.aliased is is_aliased
        assert (flat.master.values.numel() == flat.layout.num_elements) is is_whole
        assert flat.master.values.dtype == torch.float32


def test_under_ddp_the_optimizer_steps_the_modules_own_parameters() -> None:
    (flat, _), (parameters, _) = make("ddp")
    assert [part.parameter for part in flat.master.owned] == parameters
    assert all(part.parameter is own for part, own in zip(flat.master.owned, parameters, strict=True))


def test_in_bf16_ddp_steps_whole_parameters_of_fp32_and_refreshes_the_models() -> None:
    (flat, _), (parameters, _) = make("ddp", precision="bf16")
    for part in flat.master.owned:
        assert part.parameter.shape == parameters[part.index].shape
        assert part.parameter.dtype == torch.float32
        part.parameter.data.mul_(2)
    assert_values(parameters)
    refresh([flat])
    assert_values(parameters, times=2)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_an_update_of_a_slice_that_is_replicated_reaches_the_other_rank_with_the_next_gather(strategy: str) -> None:
    flats, parameters = make(strategy)
    for flat in flats:
        for part in flat.master.owned:
            part.parameter.data.mul_(2)
    gather(flats)
    for own in parameters:
        assert_values(own, times=2)


@each_strategy
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_owned_parts_of_all_ranks_are_all_elements_once(strategy: str, num_ranks: int) -> None:
    flats, _ = make(strategy, num_ranks=num_ranks)
    if STRATEGIES[strategy].optim is STRATEGIES["ddp"].optim:
        flats = flats[:1]
    for index, value in enumerate(values()):
        parts = [p.parameter.detach().reshape(-1) for flat in flats for p in flat.master.owned if p.index == index]
        assert torch.equal(torch.cat(parts) if parts else torch.zeros(0), value.reshape(-1))


def test_an_owned_part_is_one_dimensional_and_never_empty() -> None:
    flats, _ = make("fsdp")
    for flat in flats:
        assert flat.master.owned
        assert all(part.parameter.dim() == 1 and part.parameter.numel() for part in flat.master.owned)


@each_strategy
def test_all_of_the_master_is_the_values_on_every_rank(strategy: str) -> None:
    flats, _ = make(strategy, num_ranks=1)
    for view, value in zip(flats[0].full.views_of(flats[0].full_master()), values(), strict=True):
        assert torch.equal(view, value)


def test_a_master_in_host_memory_is_staged_in_the_compute_dtype() -> None:
    flats, parameters = make("fsdp", precision="bf16", offloads=True)
    flat = flats[0]
    assert flat.master.staged is not flat.master.values
    assert flat.master.staged.dtype == torch.bfloat16
    for other in flats:
        for part in other.master.owned:
            part.parameter.data.mul_(2)
        other.master.stage()
    gather(flats)
    assert_values(parameters[0], times=2)


def test_a_fill_of_one_parameter_leaves_the_others_alone() -> None:
    flats, parameters = make("fsdp")
    for flat in flats:
        flat.fill(1, torch.full((60,), -1.0))
    gather(flats)
    assert torch.equal(parameters[0][1].detach(), torch.full((60,), -1.0))
    for index in (0, 2, 3):
        assert torch.equal(parameters[0][index].detach(), values()[index])


# Gradients


def average(flat: FlatParams, *, times: float = 1.0) -> Tensor:
    """A gradient equal to the values: of everything, or of the rank's slice."""
    whole = torch.zeros(flat.layout.num_elements)
    for view, value in zip(flat.full.views_of(whole), values(), strict=True):
        view.copy_(times * value)
    if flat.placement.grads is STRATEGIES["ddp"].grads:
        return whole
    return whole.chunk(flat.groups.gather.size)[flat.groups.gather.index].clone()


def owned_grads(flat: FlatParams) -> list[tuple[int, Tensor | None]]:
    return [(part.index, part.parameter.grad) for part in flat.master.owned]


@each_strategy
def test_each_owned_part_gets_its_gradient(strategy: str) -> None:
    for flat in make(strategy)[0]:
        flat.grads.hide()
        flat.grads.add(average(flat))
        assert flat.master.has_grads
        for part in flat.master.owned:
            # The values are the gradients, so that the places can be compared.
            assert part.parameter.grad is not None
            assert torch.equal(part.parameter.grad, part.parameter.detach())


@each_strategy
def test_gradients_of_several_backwards_add_up(strategy: str) -> None:
    for flat in make(strategy)[0]:
        for times in (1.0, 2.0):
            flat.grads.hide()
            flat.grads.add(average(flat, times=times))
        for part in flat.master.owned:
            assert part.parameter.grad is not None
            assert torch.equal(part.parameter.grad, 3 * part.parameter.detach())


@pytest.mark.parametrize(
    ("strategy", "precision", "shows"),
    [("ddp", "fp32", True), ("zero1", "fp32", True), ("zero1", "bf16", True), ("zero2", "fp32", False)],
)
def test_the_models_parameters_show_the_average_where_it_is_whole(strategy: str, precision: str, shows: bool) -> None:
    flats, parameters = make(strategy, precision=precision)
    for flat, own in zip(flats, parameters, strict=True):
        flat.grads.hide()
        flat.grads.add(average(flat))
        assert flat.grads.shows is shows
        for parameter, value in zip(own, values(), strict=True):
            if shows:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, value)
            else:
                assert parameter.grad is None


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_autograd_finds_no_gradient_and_the_average_is_added_to(strategy: str) -> None:
    (flat, _), (parameters, _) = make(strategy)
    flat.grads.hide()
    flat.grads.add(average(flat))
    shown = parameters[0].grad
    flat.grads.hide()
    assert all(parameter.grad is None for parameter in parameters)
    flat.grads.add(average(flat))
    # The user may hold it.
    assert parameters[0].grad is shown
    assert torch.equal(parameters[0].grad, 2 * values()[0])


@each_strategy
def test_after_a_backward_that_raised_the_averages_of_before_are_back(strategy: str) -> None:
    flats, parameters = make(strategy)
    flat, own = flats[0], parameters[0]
    flat.grads.hide()
    flat.grads.add(average(flat))
    before = [parameter.grad for parameter in own]
    flat.grads.hide()
    own[0].grad = torch.full((10, 3), torch.nan) if flat.full.whole else None
    flat.grads.restore()
    assert all(parameter.grad is grad for parameter, grad in zip(own, before, strict=True))
    for part in flat.master.owned:
        assert part.parameter.grad is not None
        assert torch.equal(part.parameter.grad, part.parameter.detach())
    # And once: what comes after it stays.
    if flat.full.whole:
        own[0].grad = torch.ones(10, 3)
        flat.grads.restore()
        assert own[0].grad is not None


@each_strategy
def test_a_frozen_parameter_gets_no_gradient(strategy: str) -> None:
    flats, parameters = make(strategy)
    for flat, own in zip(flats, parameters, strict=True):
        own[1].requires_grad_(False)
        flat.grads.hide()
        flat.grads.add(average(flat))
        assert own[1].grad is None
        assert all((grad is None) is (index == 1) for index, grad in owned_grads(flat))


@each_strategy
def test_a_gradient_that_this_backward_alone_has_made_can_be_taken_back(strategy: str) -> None:
    flats, _ = make(strategy)
    flat = flats[0]
    flat.grads.hide()
    flat.grads.add(average(flat))
    flat.grads.drop_new(0)
    assert all((grad is None) is (index == 0) for index, grad in owned_grads(flat))
    flat.grads.hide()
    flat.grads.add(average(flat))
    # That of the first backward stays.
    flat.grads.drop_new(1)
    assert all(grad is not None for _, grad in owned_grads(flat))


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_gradient_that_was_cleared_in_the_model_is_cleared_in_the_optimizer_and_the_reverse(where: str) -> None:
    (flat, _), (parameters, _) = make("zero1")
    flat.grads.hide()
    flat.grads.add(average(flat))
    owned = {part.index: part.parameter for part in flat.master.owned}
    (parameters if where == "model" else owned)[0].grad = None
    flat.grads.drop_stale()
    assert owned[0].grad is None
    assert parameters[0].grad is None
    # Others stay, also that of which the rank owns nothing.
    assert list(owned) == [0, 1]
    assert all(gradient is not None for gradient in (owned[1].grad, parameters[1].grad, parameters[2].grad))


def test_when_all_owned_gradients_are_cleared_so_are_those_of_what_is_not_owned() -> None:
    flats, parameters = make("zero1")
    flat, own = flats[0], parameters[0]
    flat.grads.hide()
    flat.grads.add(average(flat))
    assert len(flat.master.owned) < len(own)
    for part in flat.master.owned:
        part.parameter.grad = None
    flat.grads.drop_stale()
    assert all(parameter.grad is None for parameter in own)


def test_gradients_that_are_fetched_to_host_memory_add_up_there() -> None:
    flats, _ = make("fsdp", offloads=True)
    for flat in flats:
        for _ in range(2):
            flat.grads.hide()
            flat.grads.add(average(flat))
        for part in flat.master.owned:
            assert part.parameter.grad is not None
            assert torch.equal(part.parameter.grad, 2 * part.parameter.detach())
