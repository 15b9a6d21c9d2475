"""Optimizers that need whole matrices: each is stepped by the rank that owns it, as one process would."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import given_optimizers as own
import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from torch.optim import Optimizer
from training import Case, assert_close, assert_equal, line, make_collectives, on_ranks, one_process
from whole import in_turn, whole

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.engine import engine_of
from shardwise.engine.prepared.inventory import held_bytes
from shardwise.engines import prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

SLICED = ["zero1", "zero2", "fsdp"]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": own.muon,
    "muon with adamw": own.muon_with_adamw,
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "lamb": own.Lamb,
    "lars": own.lars,
    "cautious lion": own.CautiousLion,
    "shampoo": own.Shampoo,
    "by dimensions": own.ByDimensions,
    "large blocks": partial(own.BlockAdam, block=8192),
}


@own.tried_soon
def on_ranks_soon(rank: int, case: Case, plan: Plan, late: bool) -> Any:
    return on_ranks(rank, case, plan, late)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *in_turn(["muon with adamw"], "zero1", every=SLICED),
        *in_turn(
            ["cautious lion"],
            "zero2",
            every=SLICED,
            marks=[pytest.mark.ledger("optimizer-cautious", outcome="right")],
        ),
        *in_turn(["lars"], "fsdp", every=SLICED, marks=[pytest.mark.ledger("optimizer-subclass", outcome="right")]),
        *in_turn(
            ["large blocks"], "zero1", every=SLICED, marks=[pytest.mark.ledger("optimizer-8bit", outcome="right")]
        ),
        *whole(*product(("muon", "adafactor", "lamb", "shampoo", "by dimensions"), SLICED)),
    ],
)
def test_two_ranks_are_bit_equal_to_one_process(name: str, strategy: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=OPTIMIZERS[name], num_steps=4)
    plan = Plan(strategy=strategy, bucket_bytes=4000)
    assert_equal(run_ranks(on_ranks_soon, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


@pytest.mark.whole
def test_matrices_move_on_our_ring_too() -> None:
    case = Case(make=MODELS["gpt"], optimizer=own.muon, num_steps=2)
    plan = Plan(strategy="fsdp", collectives="ring")
    assert_equal(run_ranks(on_ranks_soon, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


def test_a_plan_may_ask_for_owners_of_what_could_be_cut() -> None:
    case = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=3, set_to_none=False)
    plan = Plan(strategy="zero2", owned=("blocks.*.weight", "embed.weight"))
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


@own.tried_soon
def trained(
    rank: int, strategy: str, precision: str, max_norm: float | None, accumulate: int, num_steps: int = 3
) -> dict[str, torch.Tensor]:
    """The weights after some steps, under the late backend."""
    torch.manual_seed(1234)
    model, batch = MODELS["gpt"]()
    optimizer = own.muon(model.parameters())
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)
    plan = Plan(strategy=strategy, precision=precision, bucket_bytes=4000)
    collectives = make_collectives(late=True, rank=rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(model, optimizer, plan, collectives=collectives)
    for step in range(num_steps):
        for number in range(accumulate):
            with shardwise.accumulate(model, enabled=number + 1 < accumulate):
                cross_entropy(model, batch(accumulate * step + number, rank)).backward()
        if max_norm is not None:
            shardwise.clip_grad_norm_(model, max_norm)
        for one in (optimizer, rest):
            one.step()
            one.zero_grad()
    if plan.strategy != "ddp":
        assert engine_of(model).core.followed.plan.owned
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("precision", "max_norm", "accumulate"),
    [("fp32", None, 1), ("fp32", 0.05, 2), *whole(("bf16", None, 1), ("bf16", 0.05, 3))],
)
def test_beside_a_second_optimizer_every_strategy_gives_what_ddp_gives(
    precision: str, max_norm: float | None, accumulate: int
) -> None:
    expected = run_ranks(trained, num_ranks=2, args=("ddp", precision, max_norm, accumulate))[0]
    for strategy in SLICED:
        for result in run_ranks(trained, num_ranks=2, args=(strategy, precision, max_norm, accumulate)):
            for name, weight in expected.items():
                if max_norm is None:
                    assert torch.equal(result[name], weight), f"{strategy}: {name}"
                else:
                    # A norm is summed in another order.
                    torch.testing.assert_close(result[name], weight, rtol=1e-4, atol=1e-5)


def states(rank: int, name: str, strategy: str, state: Any = None) -> Any:
    """Full states after two steps, from `state` on if it is given."""
    torch.manual_seed(3)
    model, batch = MODELS["gpt"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = shardwise.prepare(model, OPTIMIZERS[name](model.parameters()), Plan(strategy=strategy))
    if state is not None:
        shardwise.load_full_state_dict(model, optimizer, state[0])
        optimizer.load_state_dict(state[1])
        same(shardwise.full_state_dict(model, optimizer)["optimizer"]["state"], state[0]["optimizer"]["state"])
    for step in range(2):
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardwise.full_state_dict(model, optimizer), optimizer.state_dict()


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("name", ["adafactor", *whole("muon", "muon with adamw", "shampoo", "by dimensions")])
def test_full_states_go_out_and_in_under_any_strategy(name: str) -> None:
    expected = run_ranks(states, num_ranks=2, args=(name, "ddp"))[0]
    longer = run_ranks(states, num_ranks=2, args=(name, "ddp", expected))[0]
    for strategy in ("zero1", "fsdp"):
        found = run_ranks(states, num_ranks=2, args=(name, strategy))
        for result in found:
            same(result[0], expected[0])
            same(result[1]["state"], expected[1]["state"])
        same(run_ranks(states, num_ranks=2, args=(name, strategy, expected))[0][0], longer[0])


def checkpointed(rank: int, folder: str, name: str, strategy: str, save: bool) -> Any:
    torch.manual_seed(3)
    model, batch = MODELS["gpt"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = shardwise.prepare(model, OPTIMIZERS[name](model.parameters()), Plan(strategy=strategy))
    checkpoints = Checkpoints(folder)
    if save:
        for step in range(2):
            cross_entropy(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(model, optimizer, step=2)
        checkpoints.wait()
    else:
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.load(latest, model, optimizer)
    checkpoints.close()
    return shardwise.full_state_dict(model, optimizer)


@pytest.mark.parametrize("name", ["adafactor", *whole("muon with adamw", "muon", "shampoo")])
def test_a_checkpoint_of_two_ranks_is_resumed_on_one_and_three_and_under_another_strategy(
    name: str, tmp_path: Any
) -> None:
    saved = run_ranks(checkpointed, num_ranks=2, args=(str(tmp_path), name, "fsdp", True))[0]
    for num_ranks, strategy in ((1, "fsdp"), (3, "zero1"), (2, "ddp")):
        for found in run_ranks(checkpointed, num_ranks=num_ranks, args=(str(tmp_path), name, strategy, False)):
            same(found["model"], saved["model"])
            same(found["optimizer"]["state"], saved["optimizer"]["state"])


def told(rank: int) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = own.muon(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(model, optimizer, Plan(strategy="zero2"))
    lines = [str(warning.message) for warning in caught if "OWNED" in str(warning.message)]
    assert len(lines) == (1 if rank == 0 else 0)
    if rank == 0:
        assert "Muon looks at whole parameters in its update" in lines[0]
    cross_entropy(model, batch(0, rank)).backward()
    with shardwise.tape(model) as tape:
        optimizer.step()
    kinds = [entry.kind.value for entry in tape.take()]
    program = engine_of(model).core.cursor.program
    row = [operation.kind.value for operation in program.rows[-1].operations]
    assert kinds == [kind for kind in row if kind != "wait gather"]
    assert {"to owners", "from owners"} <= set(kinds)
    mine = optimizer.param_groups[0]["params"]
    assert all(p.dim() == 2 and p.grad is None for p in mine)
    assert "is whole on this rank, which owns its optimizer state, during optimizer.step() alone" in line(
        lambda: mine[0].norm()
    )
    # One momentum of each matrix that this rank owns.
    state = held_bytes(model, optimizer)["optim"]
    assert state == sum(p.numel() * 4 for p in mine)
    sizes = [4 * p.numel() for p in MODELS["gpt"]()[0].parameters() if p.dim() == 2]
    everyone = exchange(state)
    assert sum(everyone) == sum(sizes)
    assert max(everyone) <= 1.05 * max(sum(sizes) / 2, *sizes)
    optimizer.zero_grad()
    fresh = MODELS["gpt"]()[0]
    refused = line(lambda: prepare(fresh, own.muon(fresh.parameters()), Plan(offload_states=True)))
    assert "looks at whole parameters in its update: owned with offload_states" in refused
    assert "leave one of them out" in refused


def test_prepare_says_what_is_owned_and_the_tape_shows_it_move() -> None:
    run_ranks(told, num_ranks=2)


def unused(rank: int, strategy: str) -> dict[str, torch.Tensor]:
    """A parameter that no rank uses, one that only rank 1 uses, and one that is frozen after a step."""
    torch.manual_seed(5)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(9, 9) for name in ("all", "one", "none", "frozen")})
    model.forward = lambda x: sum(  # type: ignore[method-assign]
        model[name](x).sum() for name in ("all", "frozen", *(["one"] if rank else []))
    )
    optimizer = own.Lamb(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    for step in range(3):
        if step == 1:
            model["frozen"].requires_grad_(False)
        model(torch.ones(2, 9) * (rank + step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_matrices_without_a_gradient_stay_as_they_are() -> None:
    expected = run_ranks(unused, num_ranks=2, args=("ddp",))[0]
    for strategy in SLICED:
        for result in run_ranks(unused, num_ranks=2, args=(strategy,)):
            same(result, expected)


def uncut(rank: int, folder: str) -> None:
    model, batch = MODELS["gpt"]()
    model, optimizer = shardwise.prepare(model, own.Shampoo(model.parameters()), Plan(), any_optimizer=True)
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    message = line(lambda: Checkpoints(folder).save(model, optimizer, step=1))
    assert "so it cannot be cut into slices" in message


def test_states_that_cannot_be_cut_into_slices_are_refused(tmp_path: Any) -> None:
    run_ranks(uncut, num_ranks=2, args=(str(tmp_path),))


def made_later(rank: int, strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1234)
    model, batch = MODELS["gpt"]()
    model, _ = shardwise.prepare(model, None, Plan(strategy=strategy))
    optimizer = own.muon(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            cross_entropy(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_an_optimizer_that_is_made_after_prepare_gets_its_matrices_whole() -> None:
    expected = run_ranks(made_later, num_ranks=2, args=("ddp",))[0]
    for strategy in ("zero1", "fsdp"):
        for result in run_ranks(made_later, num_ranks=2, args=(strategy,)):
            same(result, expected)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", [SLICED[0], *whole(*SLICED[1:])])
def test_every_copy_of_a_shard_group_has_owners_of_its_own(strategy: str) -> None:
    case = Case(make=MODELS["vit"], optimizer=own.ByDimensions, num_steps=3, double=True)
    plan = Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=2), precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=4, args=(case, plan, True)), one_process(case, num_ranks=4), tolerance=1e-9
    )
