"""Autograd's gradients of a flat buffer, from which the pieces take their parts one after the other."""

import torch
from torch import nn

from shardwise.engine.core.shared_grads import SharedGrads


def parameters() -> list[nn.Parameter]:
    dense, sparse, unused = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    dense.grad = torch.arange(6.0).view(3, 2).t()
    rows, values = torch.tensor([[1]]), torch.full((1, 3), 7.0)
    sparse.grad = torch.sparse_coo_tensor(rows, values, (2, 3), check_invariants=True)
    return [dense, sparse, unused]


def test_every_piece_is_given_the_same_rows_and_the_last_one_leaves_none() -> None:
    shared, params = SharedGrads(), parameters()
    first = shared.take(params, is_last=False)
    assert [None if row is None else row.tolist() for row in first] == [
        [0.0, 2.0, 4.0, 1.0, 3.0, 5.0],
        [0.0, 0.0, 0.0, 7.0, 7.0, 7.0],
        None,
    ]
    assert all(parameter.grad is None for parameter in params)
    assert len(shared.tensors()) == 2
    last = shared.take(params, is_last=True)
    assert all(one is other for one, other in zip(first, last, strict=True))
    assert shared.tensors() == []


def test_what_is_cleared_is_not_taken_by_later_pieces() -> None:
    shared, params = SharedGrads(), parameters()
    shared.take(params, is_last=False)
    shared.average = torch.ones(3)
    shared.clear()
    assert shared.average is None
    assert shared.take(params, is_last=True) == [None] * 3
