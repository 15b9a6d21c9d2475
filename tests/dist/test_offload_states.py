"""Parameters and optimizer state in host memory: the same training, updated there or on the device."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks
from training import Case, assert_equal, make_collectives, on_ranks, one_process
from whole import whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.engine.optimizer import streamed_update
from shardwise.engine.prepared.inventory import held_bytes
from shardwise.engines import require_engine
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

SHARDED = ["zero2", "shard_grad_op", "fsdp"]
UPDATES = ["device", "host"]
GPT = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=4)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("strategy", SHARDED)
def test_offloaded_states_train_as_one_process_does(strategy: str, update: str) -> None:
    plan = Plan(strategy=strategy, offload_states=True, offload_update=update)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(GPT, plan, True)), one_process(GPT, num_ranks=2))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_some_units_have_their_states_in_host_memory(num_ranks: int) -> None:
    plan = Plan(strategy="fsdp", offload_states=("blocks.0", "(root)"), overrides={"blocks.1": "zero2"})
    found = run_ranks(on_ranks, num_ranks=num_ranks, args=(GPT, plan, True))
    assert_equal(found, one_process(GPT, num_ranks=num_ranks))


OPTIMIZERS = {
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_pass_through_the_device_in_many_pieces_are_updated_as_one(name: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=OPTIMIZERS[name], num_steps=4)
    found = run_ranks(in_pieces, num_ranks=2, args=(case,))
    assert_equal(found, one_process(case, num_ranks=2))


def in_pieces(rank: int, case: Case) -> Any:
    # As the usual number, a multiple of a CPU's vectors: torch's fused kernels round the rest behind the last one otherwise.
    with patch.object(streamed_update, "CHUNK_ELEMENTS", 96):
        return on_ranks(rank, case, Plan(strategy="fsdp", offload_states=True), True)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("shard_grad_op")])
def test_offloaded_states_are_staged_in_the_dtype_that_computes(strategy: str) -> None:
    plan = Plan(strategy=strategy, precision="bf16", reduce_dtype="fp32")
    offloaded = Plan(strategy=strategy, precision="bf16", reduce_dtype="fp32", offload_states=True)
    expected = run_ranks(on_ranks, num_ranks=2, args=(GPT, plan, False))
    for one, other in zip(expected, run_ranks(on_ranks, num_ranks=2, args=(GPT, offloaded, True)), strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())


def kept_on_the_host(rank: int) -> None:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    plan = Plan(strategy="fsdp", precision="bf16", offload_states=True, overrides={"blocks.0": "ddp"})
    collectives = make_collectives(late=True, rank=rank)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan, collectives=collectives)
    losses = []
    for step in range(3):
        with shardwise.accumulate(model, enabled=False):
            loss = cross_entropy(model, batch(step, rank))
            loss.backward()
        # Gradients add up on the host as well.
        cross_entropy(model, batch(step, rank)).backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held = held_bytes(model, optimizer)
    sharded = [flat for flat in engine_of(model).core.flats if flat.master.host is not None]
    # fp32 master and two moments, the parameters staged in bf16, and AdamW's step counts.
    sizes = sum(flat.layout.slice_elements for flat in sharded)
    counts = 4 * sum(len(flat.master.owned) for flat in sharded)
    assert held["host"] == sizes * (4 + 2 + 8) + counts
    # What is replicated stays on the device: bf16 parameters, fp32 master and moments.
    (replicated,) = [flat for flat in engine_of(model).core.flats if flat.master.host is None]
    assert held["params"] == 2 * replicated.layout.num_elements
    state = shardwise.full_state_dict(model, optimizer)
    other, _ = MODELS["gpt"]()
    _, other_optimizer = shardwise.prepare(other, adamw(other.parameters()), Plan(strategy="zero1"))
    shardwise.load_full_state_dict(other, other_optimizer, state)
    again = shardwise.full_state_dict(other, other_optimizer)
    assert all(torch.equal(again["model"][name], value) for name, value in state["model"].items())
    shardwise.load_full_state_dict(model, optimizer, again)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state["model"].items())


def gradients_of_a_step(rank: int, update: str) -> dict[str, int]:
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    plan = Plan(strategy="fsdp", offload_states=("blocks.*",), offload_update=update)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    held = []
    for step in range(2):
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(held_bytes(model, optimizer)["grads"])
    others = [tensor for category, tensor in require_engine(model).held_tensors(optimizer) if category == "other"]
    slots = {id(buffer) for buffer in engine_of(model).owned.streamed.slot_tensors()}
    counted = sum(id(tensor) in slots for tensor in others)
    sizes = sum(4 * flat.layout.slice_elements for flat in engine_of(model).core.flats if flat.master.host is not None)
    return {"held": held[-1], "slices": sizes, "slots": len(slots), "counted": counted}


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_that_an_update_still_reads_and_its_slots_are_counted_on_the_device(update: str) -> None:
    for found in run_ranks(gradients_of_a_step, num_ranks=2, args=(update,)):
        assert found["held"] == (found["slices"] if update == "device" else 0)
        assert found["slots"] == found["counted"]
        assert bool(found["slots"]) == (update == "device")


def test_what_is_offloaded_is_counted_on_the_host_and_can_be_saved_and_loaded() -> None:
    run_ranks(kept_on_the_host, num_ranks=2)
