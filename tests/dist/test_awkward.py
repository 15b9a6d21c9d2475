"""Awkward models train as in one process, whatever each rank calls, uses and freezes."""

import warnings
from functools import partial
from itertools import cycle

import awkward
import pytest
import torch
from cases import adamw
from ranks import run_ranks, shut_down
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Case, Result, assert_close, assert_equal, make_collectives, model_units, on_ranks, one_process
from whole import in_turn, strategies, whole

from shardwise.base.errors import ShardwiseError
from shardwise.engine.engine import engine_of, tape
from shardwise.engines import prepare
from shardwise.plan import Plan


def case_of(name: str, *, double: bool = False) -> Case:
    make = partial(awkward.make, name)
    return Case(make=make, optimizer=adamw, loss=awkward.loss_of, num_steps=awkward.NUM_STEPS, double=double)


@pytest.mark.parametrize(("name", "strategy"), in_turn(awkward.MODELS, "zero2", "fsdp"))
def test_an_awkward_model_is_bit_equal_to_one_process(name: str, strategy: str) -> None:
    plan = Plan(strategy=strategy, units=awkward.MODELS[name][1], bucket_bytes=600)
    results = run_ranks(on_ranks, num_ranks=2, args=(case_of(name), plan, True))
    assert_equal(results, one_process(case_of(name), num_ranks=2))


MORE_RANKS = [
    (name, *more)
    for name, more in zip(awkward.MODELS, cycle([(3, "fsdp"), (4, "zero2"), (4, "fsdp"), (3, "zero2")]), strict=False)
]


# Few, because two ranks show the same of every model, bit for bit.
@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"),
    [case if number % 3 == 0 else whole(case)[0] for number, case in enumerate(MORE_RANKS)],
)
def test_an_awkward_model_agrees_with_one_process_on_more_ranks(name: str, num_ranks: int, strategy: str) -> None:
    case = case_of(name, double=True)
    plan = Plan(strategy=strategy, units=awkward.MODELS[name][1], precision="native", prefetch=2)
    results = run_ranks(on_ranks, num_ranks=num_ranks, args=(case, plan, True))
    assert_close(results, one_process(case, num_ranks=num_ranks), tolerance=1e-10)


@pytest.mark.parametrize("name", ["ranks take different branches", "ranks call units differently often"])
@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_ranks_that_agree_on_each_gather_need_no_order(name: str, strategy: str) -> None:
    plan = Plan(strategy=strategy, units=awkward.MODELS[name][1], dynamic=True)
    results = run_ranks(on_ranks, num_ranks=2, args=(case_of(name), plan, True))
    assert_equal(results, one_process(case_of(name), num_ranks=2))


def goes_its_own_way(rank: int) -> str:
    model = awkward.Net()
    prepare(model, None, Plan(strategy="fsdp", units="class:Block"))
    engine_of(model).core.followed.limit_seconds = 0.5
    awkward.loss_of(model, awkward.batch(0, rank)).backward()
    if rank == 1:
        awkward.loss_of(model, awkward.batch(1, rank))
    else:
        # Backwards through the blocks, all by itself.
        model.run = lambda x, step, rank: model.blocks[0](model.blocks[2](x))
        with pytest.raises(ShardwiseError) as caught:
            awkward.loss_of(model, awkward.batch(1, rank))
        return str(caught.value)
    return ""


def test_a_rank_that_leaves_the_order_alone_is_told_so_instead_of_waiting_for_ever() -> None:
    said = run_ranks(goes_its_own_way, num_ranks=2)[0]
    shut_down()  # its collectives are half-done
    assert said.startswith("rank 1 did not come to a gather of blocks.0 that the first step had no place for")
    assert "dynamic = true" in said


def torchs_ddp(rank: int, case: Case) -> Result:
    """torch's own, which is told to look for unused parameters."""
    torch.manual_seed(1234)
    model, batch = case.make()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = case.optimizer(model.parameters())
    losses = []
    for step in range(case.num_steps):
        loss = case.loss(ddp, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item()])
    return Result(losses=losses, weights={name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize("name", [name for name in awkward.MODELS if "branch" in name or "unused" in name])
@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_unused_parameters_train_as_under_torchs_ddp(name: str, strategy: str) -> None:
    case = case_of(name)
    expected = run_ranks(torchs_ddp, num_ranks=2, args=(case,))
    plan = Plan(strategy=strategy, units=awkward.MODELS[name][1])
    for result, other in zip(run_ranks(on_ranks, num_ranks=2, args=(case, plan, False)), expected, strict=True):
        assert result.losses == other.losses
        assert all(torch.equal(result.weights[key], value) for key, value in other.weights.items())


def grads_left(rank: int, strategy: str) -> None:
    model, batch = awkward.make("a parameter is unused, another is used on one rank")
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy, units="class:PartlyUsedBlock"))
    for step in range(2):
        awkward.loss_of(model, batch(step, rank)).backward()
        for unit in model_units(model):
            for flat in unit.flats:
                for part in flat.master.owned:
                    name = flat.names[part.index]
                    used = "spare" not in name and ("sometimes" not in name or (step == 1 and "1" in name))
                    assert (part.parameter.grad is not None) == used, name
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_any_used_has(strategy: str) -> None:
    run_ranks(grads_left, num_ranks=2, args=(strategy,))


def thawed(rank: int, strategy: str, prepared: bool) -> list[float]:
    """Another part is frozen in every phase; two steps each. The same data on both ranks."""
    torch.manual_seed(5)
    model = awkward.Net()
    optimizer = adamw(model.parameters())
    if prepared:
        plan = Plan(strategy=strategy, units="class:Block")
        prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    losses = []
    phases = [(), ("blocks.0", "blocks.2"), ("blocks.1.up", "first"), ("blocks.1",), ()]
    for phase, frozen in enumerate(phases):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        awkward.freeze(model, *frozen)
        for step in range(2):
            loss = awkward.loss_of(model, awkward.batch(2 * phase + step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_parameters_may_be_frozen_and_thawed_between_steps(strategy: str) -> None:
    (expected,) = run_ranks(thawed, num_ranks=1, args=(strategy, False))
    assert run_ranks(thawed, num_ranks=2, args=(strategy, True)) == [expected, expected]


def opaque(rank: int, strategy: str) -> list[str]:
    model, batch = awkward.make_opaque()
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy, units="class:OpaqueBlock"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            awkward.loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught if "stay gathered" in str(warning.message)]


def test_a_unit_whose_output_hides_its_tensors_trains_the_same_and_says_so_once() -> None:
    case = Case(make=awkward.make_opaque, optimizer=adamw, loss=awkward.loss_of, num_steps=4)
    for strategy in ("fsdp", "shard_grad_op", "ddp"):
        plan = Plan(strategy=strategy, units="class:OpaqueBlock")
        results = run_ranks(on_ranks, num_ranks=2, args=(case, plan, True))
        assert_equal(results, one_process(case, num_ranks=2))
    for said in run_ranks(opaque, num_ranks=2, args=("fsdp",)):
        assert [line.split()[0] for line in said] == ["blocks.0", "blocks.1", "blocks.2"]


def follows_the_program(rank: int, name: str, strategy: str) -> None:
    from shardwise.program import build

    model, batch = awkward.make(name)
    optimizer = adamw(model.parameters())
    plan = Plan(strategy=strategy, units=awkward.MODELS[name][1], prefetch=1)
    prepare(model, optimizer, plan)
    with tape(model) as recorded:
        for step in range(3):
            awkward.loss_of(model, batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            entries = [str(entry) for entry in recorded.take()]
            if step:
                expected = list(map(str, build(engine_of(model).core.followed.spec, plan=plan).operations()))
                assert entries == expected, f"{entries}\n{expected}"


FOLLOWING = [
    "a unit is called twice",
    "a long skip",
    "units inside units",
    "outputs are None",
    "an auxiliary loss is kept on the module",
    "units are partly frozen",
    "a unit is all frozen",
    "the first units are frozen",
]


@pytest.mark.parametrize(("name", "strategy"), in_turn(FOLLOWING, "fsdp", "zero2", every=("ddp", "zero2", "fsdp")))
def test_an_awkward_model_issues_what_its_program_says(name: str, strategy: str) -> None:
    run_ranks(follows_the_program, num_ranks=2, args=(name, strategy))


def memory_of_frozen(rank: int) -> None:
    """Frozen units do not pile up in backward: at most two of them are whole at once."""
    model: nn.Module = awkward.freeze(awkward.Net(num_blocks=8), *(f"blocks.{i}" for i in range(8)))
    prepare(model, None, Plan(strategy="fsdp", units="class:Block", prefetch=1))
    most = 0

    def count(grad: torch.Tensor) -> None:
        nonlocal most
        units = [unit for unit in model_units(model) if unit.name != "(root)"]
        most = max(most, sum(unit.whole for unit in units))

    handles = [
        block.register_forward_hook(lambda module, inputs, output: output.register_hook(count) and None)
        for block in model.blocks
    ]
    for step in range(2):
        awkward.loss_of(model, awkward.batch(step, rank)).backward()
    assert most == 2
    for handle in handles:
        handle.remove()


def test_frozen_units_are_freed_as_backward_leaves_them() -> None:
    run_ranks(memory_of_frozen, num_ranks=2)
