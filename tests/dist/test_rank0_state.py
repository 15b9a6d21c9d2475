"""`full_state_dict(rank0_only=True)`: what the ranks hold that only take part."""

import pytest
import torch
from cases import adamw, make_tokens
from live import LiveTensors, Silent
from ranks import run_ranks
from whole import whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

SHAPE = GPTShape(num_layers=8, width=64, num_heads=2, vocab_size=64, max_seq=8)


def taken(rank: int, strategy: str) -> tuple[int, int, int]:
    """(bytes beyond what was live before, of the largest buffer, of all parameters)."""
    with LiveTensors() as live:
        model, batch = make_tokens(SHAPE)
        _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
        cross_entropy(model, batch(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        flats = engine_of(model).core.flats
        engine_of(model).core.wait_gathers()
        for flat in flats:
            # A backend's thread would free memory unseen.
            flat.collectives = Silent()
        with live.phase("before"):
            pass
        with live.phase("state"):
            state = shardwise.full_state_dict(model, optimizer, rank0_only=True)
    assert (len(state) == 0) == (rank != 0)
    sizes = [flat.layout.num_elements * 4 for flat in flats]
    return live.peak_bytes("state") - live.end_bytes("before"), max(sizes), sum(sizes)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_a_rank_that_only_takes_part_holds_one_buffer_at_a_time(strategy: str) -> None:
    (rank0, _, _), (rank1, largest, total) = run_ranks(taken, num_ranks=2, args=(strategy,))
    assert rank0 >= 3 * total
    assert total > 5 * largest
    # And what ranks tell each other about the optimizer's states.
    assert rank1 <= largest + total // 20


def same_state(rank: int, strategy: str) -> None:
    model, batch = make_tokens(SHAPE)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    everywhere = shardwise.full_state_dict(model, optimizer)
    on_rank0 = shardwise.full_state_dict(model, optimizer, rank0_only=True)
    assert (on_rank0 == {}) == (rank != 0)
    if rank == 0:
        assert on_rank0["model"].keys() == everywhere["model"].keys()
        assert all(torch.equal(on_rank0["model"][name], value) for name, value in everywhere["model"].items())
        assert on_rank0["optimizer"]["param_groups"] == everywhere["optimizer"]["param_groups"]
        for name, states in everywhere["optimizer"]["state"].items():
            assert all(torch.equal(on_rank0["optimizer"]["state"][name][key], value) for key, value in states.items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_rank_0_has_what_it_has_when_all_ranks_ask(strategy: str) -> None:
    run_ranks(same_state, num_ranks=2, args=(strategy,))
