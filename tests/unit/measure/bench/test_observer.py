"""What a step is seen to do: the formula of each collective, and the dtypes of products in forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.comm.job.absent import absent_group
from shardwise.hardware.measuring.measure_ranks import _all_gather, _reduce_scatter
from shardwise.measure.bench.observer import Observer, stepped_dtypes

NUM_RANKS = 4
NUM_BYTES = 4 * 16


def all_gather() -> None:
    _all_gather(torch.zeros(16), torch.zeros(4))


def reduce_scatter() -> None:
    _reduce_scatter(torch.zeros(4), torch.zeros(16))


def listed_all_gather() -> None:
    dist.all_gather([torch.zeros(4) for _ in range(NUM_RANKS)], torch.zeros(4))


def of_a_pair() -> None:
    """The size that counts is the group's, not the job's."""
    dist.all_reduce(torch.zeros(16), group=dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("issue", "name", "sent_bytes"),
    [
        (lambda: dist.all_reduce(torch.zeros(16)), "all_reduce", 2 * NUM_BYTES * 3 / 4),
        (all_gather, "all_gather", NUM_BYTES * 3 / 4),
        (listed_all_gather, "all_gather", NUM_BYTES * 3 / 4),
        (reduce_scatter, "reduce_scatter", NUM_BYTES * 3 / 4),
        (lambda: dist.broadcast(torch.zeros(16), src=0), "broadcast", NUM_BYTES),
        (of_a_pair, "all_reduce", 2 * NUM_BYTES / 2),
    ],
)
def test_a_collective_counts_what_a_ring_sends(issue: Callable[[], None], name: str, sent_bytes: float) -> None:
    with absent_group(NUM_RANKS), Observer() as observer:
        issue()
    assert observer.observed.calls == {name: 1}
    assert observer.observed.sent_bytes == sent_bytes


def test_what_a_dtensor_issues_is_counted_once() -> None:
    with absent_group(NUM_RANKS):
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        spread = distribute_tensor(torch.ones(16), mesh, [Shard(0)])
        with Observer() as observer:
            spread.full_tensor()
            spread.sum().full_tensor()
    assert observer.observed.calls == {"all_gather": 1, "all_reduce": 1}
    assert observer.observed.sent_bytes == NUM_BYTES * 3 / 4 + 2 * 4 * 3 / 4


def test_one_rank_sends_nothing_and_its_calls_are_counted() -> None:
    with absent_group(1), Observer() as observer:
        dist.all_reduce(torch.zeros(16))
        dist.broadcast(torch.zeros(16), src=0)
    assert observer.observed.calls == {"all_reduce": 1, "broadcast": 1}
    assert observer.observed.sent_bytes == 0


def test_products_are_seen_in_forward_and_in_backward_and_nothing_else_is() -> None:
    layer = nn.Linear(4, 4)
    with Observer() as observer:
        (torch.ones(4, dtype=torch.float64) * 2).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(torch.ones(2, 4))
        assert observer.observed.computed_in == {"bfloat16"}
        observer.observed.computed_in.clear()
        output.sum().backward()
    assert observer.observed.computed_in == {"bfloat16"}


def test_the_dtypes_of_what_an_optimizer_steps_and_keeps_are_those_of_its_step() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        with stepped_dtypes(optimizer) as found:
            optimizer.step()
    # The counter of steps is in float32, and is no state of the parameter's precision.
    assert found == {"master": {"bfloat16"}, "grads": {"bfloat16"}, "optim": {"bfloat16"}}


def test_what_attention_keeps_for_its_backward_is_none_of_what_it_multiplies() -> None:
    query = torch.ones(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    with Observer() as observer:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert observer.observed.computed_in == {"bfloat16"}
