"""What a user may do with a prepared model: optimizers, evaluation, exceptions, awkward parameters, misuse."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from cases import GPT, MODELS, OPTIMIZERS, Batch, adamw, by_weight_decay, make_awkward, sgd, squares
from ranks import run_ranks
from torch import nn
from training import Case, Result, assert_close, assert_equal, make_collectives, on_ranks, one_process
from whole import in_turn, strategies, whole

from shardwise.engine.core.unit import Unit
from shardwise.engine.engine import engine_of
from shardwise.engines import find_engine, full_state_dict, load_full_state_dict, prepare
from shardwise.models.make import build_model
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
@pytest.mark.parametrize("late", [True, *whole(False)])
def test_awkward_sizes_and_ties_train_as_in_one_process(strategy: str, late: bool) -> None:
    case = Case(make=make_awkward, optimizer=adamw, loss=squares, num_steps=5)
    assert_equal(
        run_ranks(on_ranks, num_ranks=2, args=(case, Plan(strategy=strategy), late)), one_process(case, num_ranks=2)
    )
    double = Case(make=make_awkward, optimizer=adamw, loss=squares, num_steps=5, double=True)
    plan = Plan(strategy=strategy, precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=4, args=(double, plan, late)), one_process(double, num_ranks=4), tolerance=1e-10
    )


@pytest.mark.parametrize(
    ("optimizer", "strategy"), in_turn(OPTIMIZERS, "zero1", "fsdp", every=("ddp", "zero1", "zero2", "fsdp"))
)
def test_every_optimizer_steps_slices_as_it_steps_the_whole(optimizer: str, strategy: str) -> None:
    case = Case(make=MODELS["vit"], optimizer=OPTIMIZERS[optimizer], num_steps=3)
    assert_equal(
        run_ranks(on_ranks, num_ranks=2, args=(case, Plan(strategy=strategy), False)), one_process(case, num_ranks=2)
    )


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_gradients_that_are_zeroed_and_kept_train_the_same(strategy: str) -> None:
    kept = Case(make=MODELS["vit"], optimizer=adamw, num_steps=4, set_to_none=False)
    plain = Case(make=MODELS["vit"], optimizer=adamw, num_steps=4)
    assert_equal(
        run_ranks(on_ranks, num_ranks=2, args=(kept, Plan(strategy=strategy), True)), one_process(plain, num_ranks=2)
    )


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_weights_that_differ_between_ranks_start_as_rank_0s(strategy: str) -> None:
    case = Case(make=MODELS["vit"], optimizer=adamw, num_steps=2)
    results = run_ranks(on_ranks, num_ranks=2, args=(case, Plan(strategy=strategy), False, True))
    assert_equal(results, one_process(case, num_ranks=2))


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_clipping_is_by_the_norm_of_the_whole_gradient(strategy: str) -> None:
    case = Case(make=MODELS["llama"], optimizer=adamw, num_steps=4, max_norm=0.1, double=True)
    plan = Plan(strategy=strategy, precision="native", overrides={"blocks.1": "ddp", "(root)": "zero1"})
    assert_close(
        run_ranks(on_ranks, num_ranks=4, args=(case, plan, True)), one_process(case, num_ranks=4), tolerance=1e-10
    )


OVERRIDES: list[dict[str, Any]] = [
    {"blocks.0": "ddp", "blocks.1": "shard_grad_op", "blocks.2": "zero1"},
    {"(root)": "ddp"},
    {"(root)": "fsdp", "blocks.*": "zero2", "blocks.2": "ddp"},
]


@pytest.mark.parametrize(
    ("overrides", "collectives"), in_turn(OVERRIDES, "ring", "backend", every=("backend", "ring")), ids=str
)
def test_units_may_differ(overrides: dict[str, str], collectives: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)
    plan = Plan(strategy="fsdp", overrides=overrides, collectives=collectives, prefetch=2)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


def train(model: nn.Module, optimizer: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def interrupted(rank: int, strategy: str) -> None:
    """Whatever happens between steps, training goes on as if it had not."""
    plain, batch = MODELS["gpt"]()
    optimizer = sgd(plain.parameters())
    torch.manual_seed(1)
    model = copy.deepcopy(plain)
    prepare(plain, optimizer, Plan(strategy=strategy), collectives=make_collectives(late=True, rank=rank))
    batches = [batch(step, rank) for step in range(6)]
    expected = train(plain, optimizer, batches)

    other = sgd(model.parameters())
    prepare(model, other, Plan(strategy=strategy), collectives=make_collectives(late=True, rank=rank))
    losses = train(model, other, batches[:1])
    with torch.no_grad():
        cross_entropy(model, batches[0])
    losses += train(model, other, batches[1:2])
    model.eval()
    with torch.inference_mode():
        cross_entropy(model, batches[0])
    model.train()
    losses += train(model, other, batches[2:3])
    cross_entropy(model, batches[0])  # a forward that is never gone back through
    losses += train(model, other, batches[3:4])
    for where in ("forward", "backward"):
        with pytest.raises(ZeroDivisionError):
            raises_in(where, model, batches[0])
    losses += train(model, other, batches[4:5])
    twice = cross_entropy(model, batches[5])
    (twice * 0.25).backward(retain_graph=True)
    (twice * 0.75).backward()
    other.step()
    model.zero_grad()
    losses.append(twice.item())
    assert losses == expected
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-6, rtol=1e-5)


def raises_in(where: str, model: nn.Module, batch: Batch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    block = model.blocks[1]
    if where == "forward":
        handle = block.feed_forward.register_forward_hook(fail)
        try:
            cross_entropy(model, batch)
        finally:
            handle.remove()
    else:
        handle = block.feed_forward.register_forward_hook(
            lambda module, inputs, output: output.register_hook(fail) and None
        )
        try:
            cross_entropy(model, batch).backward()
        finally:
            handle.remove()


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_evaluation_and_exceptions_between_steps_change_nothing(strategy: str) -> None:
    run_ranks(interrupted, num_ranks=2, args=(strategy,))


def optimizer_made_later(rank: int, strategy: str) -> Result:
    case = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)
    torch.manual_seed(1234)
    model, batch = case.make()
    prepare(model, None, Plan(strategy=strategy))
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses = []
    for step in range(case.num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append([loss.item()])
    return Result(losses=losses, weights=dict(model.state_dict()))


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_an_optimizer_may_be_made_after_prepare(strategy: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)
    assert_equal(run_ranks(optimizer_made_later, num_ranks=2, args=(strategy,)), one_process(case, num_ranks=2))


def from_meta(rank: int, strategy: str) -> None:
    torch.manual_seed(7)
    whole = build_model(GPT)
    model = build_model(GPT, device="meta")
    optimizer = adamw(model.parameters())
    torch.manual_seed(7 + rank)  # rank 0's counts
    prepare(model, optimizer, Plan(strategy=strategy), device="cpu")
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    assert model.head.weight is model.embed.weight
    train(model, optimizer, [MODELS["gpt"]()[1](0, rank)])
    assert not torch.equal(model.state_dict()["embed.weight"], whole.embed.weight)


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_model_on_the_meta_device_is_filled_straight_into_shards(strategy: str) -> None:
    run_ranks(from_meta, num_ranks=2, args=(strategy,))


def saved_and_loaded(rank: int, strategy: str) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = by_weight_decay(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy))
    train(model, optimizer, [batch(step, rank) for step in range(2)])
    state = full_state_dict(model, optimizer)
    expected = train(model, optimizer, [batch(step, rank) for step in range(2, 4)])
    for other_strategy in ("ddp", "zero1", "fsdp"):
        other, _ = MODELS["gpt"]()
        other_optimizer = by_weight_decay(other.parameters())
        prepare(other, other_optimizer, Plan(strategy=other_strategy))
        only_rank_0 = state if rank == 0 else {}
        load_full_state_dict(other, other_optimizer, only_rank_0, from_rank0=True)
        assert_same_state(full_state_dict(other, other_optimizer), state)
        losses = train(other, other_optimizer, [batch(step, rank) for step in range(2, 4)])
        if dist.get_world_size() == 2:
            # On more ranks, the order in which gradients are summed depends on where they lie in a buffer.
            assert losses == expected
    # And an ordinary model and optimizer take it by name.
    plain, _ = MODELS["gpt"]()
    plain.load_state_dict(state["model"])
    assert state["optimizer"]["state"]["embed.weight"]["exp_avg"].shape == plain.embed.weight.shape
    assert [len(group["params"]) for group in state["optimizer"]["param_groups"]] == [
        sum(p.dim() >= 2 for p in plain.parameters()),
        sum(p.dim() < 2 for p in plain.parameters()),
    ]


def assert_same_state(one: Any, other: Any) -> None:
    """Bit for bit, also what is nested."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        *(("zero1", 3), ("fsdp", 2)),
        *whole(("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero2", 2), ("zero2", 3)),
        *whole(("shard_grad_op", 2), ("shard_grad_op", 3), ("fsdp", 3)),
    ],
)
def test_a_full_state_loads_under_any_strategy(strategy: str, num_ranks: int) -> None:
    run_ranks(saved_and_loaded, num_ranks=num_ranks, args=(strategy,))


def copied(rank: int, plan: Plan) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, plan)
    train(model, optimizer, [batch(0, rank)])
    twin = copy.deepcopy(model)
    assert type(twin).__mro__[1] is nn.Module
    assert twin.head.weight is twin.embed.weight
    assert find_engine(twin) is None
    assert find_engine(model) is not None
    assert not any("forward" in module.__dict__ for module in twin.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    assert torch.equal(twin(batch(1, 0)[0]), model(batch(1, 0)[0]))
    train(model, optimizer, [batch(1, rank)])


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(recompute="full", offload_activations=True, offload_states=True)],
    ids=["plain", "recomputed and offloaded"],
)
def test_a_deep_copy_is_an_ordinary_whole_model(plan: Plan) -> None:
    run_ranks(copied, num_ranks=2, args=(plan,))


def drop_model(rank: int, strategy: str) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy))
    train(model, optimizer, [batch(step, rank) for step in range(2)])
    # What is being gathered belongs to the collective until it ends.
    with torch.no_grad():
        model(batch(0, rank)[0])
    full = weakref.ref(engine_of(model).core.flats[0].full.buffer)
    del model, optimizer, batch
    gc.collect()
    assert full() is None


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_a_dropped_model_takes_its_memory_with_it(strategy: str) -> None:
    run_ranks(drop_model, num_ranks=2, args=(strategy,))


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def recomputed(rank: int, strategy: str) -> None:
    plain, batch = MODELS["gpt"]()
    model = copy.deepcopy(plain)
    for index in range(len(model.blocks)):
        model.blocks[index] = Recomputed(model.blocks[index])
    batches = [batch(step, rank) for step in range(3)]
    losses = []
    for each in (plain, model):
        optimizer = adamw(each.parameters())
        plan = Plan(strategy=strategy, units="class:Block")
        prepare(each, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
        losses.append(train(each, optimizer, batches))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_blocks_that_are_recomputed_train_the_same(strategy: str) -> None:
    run_ranks(recomputed, num_ranks=2, args=(strategy,))


def two_forwards(rank: int, strategy: str) -> None:
    """Two passes through the model in one loss, as contrastive losses have them."""
    results = []
    for prepared in (False, True):
        torch.manual_seed(3)
        model, batch = MODELS["gpt"]()
        optimizer = sgd(model.parameters())
        if prepared:
            prepare(model, optimizer, Plan(strategy=strategy), collectives=make_collectives(late=True, rank=rank))
        for step in range(3):
            # The same data on both ranks, so that one process is its own reference.
            loss = cross_entropy(model, batch(2 * step, 0)) + cross_entropy(model, batch(2 * step + 1, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(dict(model.state_dict()))
    for name, weight in results[0].items():
        torch.testing.assert_close(results[1][name], weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_two_forwards_may_share_a_backward(strategy: str) -> None:
    run_ranks(two_forwards, num_ranks=2, args=(strategy,))


def units_backward_came_to(rank: int, plan: Plan) -> list[str]:
    """Of a step after the first."""
    model: nn.Module = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(4, 4), nn.Tanh())))
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    core = engine_of(model).core
    came: list[str] = []
    before_backward = core.before_backward

    def noted(unit: Unit, call: int) -> None:
        came.append(unit.name)
        before_backward(unit, call)

    core.before_backward = noted  # type: ignore[method-assign]
    for _ in range(2):
        came.clear()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return came


@pytest.mark.parametrize(
    ("strategy", "precision", "all_of_them"),
    [("ddp", "bf16", True), ("zero2", "bf16", False), ("ddp", "fp32", True), ("fsdp", "bf16", True)],
)
def test_backward_is_awaited_where_units_are_freed_or_gradients_show_averages(
    strategy: str, precision: str, all_of_them: bool
) -> None:
    plan = Plan(strategy=strategy, precision=precision, units="class:Linear")
    for came in run_ranks(units_backward_came_to, num_ranks=2, args=(plan,)):
        assert set(came) == ({"(root)", "0", "2", "4"} if all_of_them else {"(root)"})
