"""Autograd's gradients of a flat buffer, from which the pieces take their parts one after the other."""

import torch
from engine.peers import Peers, setting_of
from torch import nn

from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.flat_gradients import Gradients
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program.buffers import flat_specs
from shardwise.program.spec import ROOT, TensorSpec, UnitSpec


def gradients() -> Gradients:
    dense, sparse, unused = params = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    specs = tuple(TensorSpec(name=f"p{index}", shape=(2, 3)) for index in range(3))
    (spec,) = flat_specs(UnitSpec(name=ROOT, class_name="Net", params=specs), plan=Plan())
    flat = FlatParams(
        params,
        spec=spec,
        placement=STRATEGIES["fsdp"],
        setting=setting_of(Mesh(), rank=0, peers=Peers(1), plan=Plan()),
        host=None,
    )
    dense.grad = torch.arange(6.0).view(3, 2).t()
    rows, values = torch.tensor([[1]]), torch.full((1, 3), 7.0)
    sparse.grad = torch.sparse_coo_tensor(rows, values, (2, 3), check_invariants=True)
    assert unused.grad is None
    return flat.grads


def test_every_piece_is_given_the_same_rows_and_the_last_one_leaves_none() -> None:
    grads = gradients()
    first = grads.take_rows(is_last=False)
    assert [None if row is None else row.tolist() for row in first] == [
        [0.0, 2.0, 4.0, 1.0, 3.0, 5.0],
        [0.0, 0.0, 0.0, 7.0, 7.0, 7.0],
        None,
    ]
    assert len(grads.rows()) == 2
    last = grads.take_rows(is_last=True)
    assert all(one is other for one, other in zip(first, last, strict=True))
    assert grads.rows() == []


def test_what_is_dropped_is_not_taken_by_later_pieces() -> None:
    grads = gradients()
    grads.take_rows(is_last=False)
    grads.begin(torch.ones(3))
    grads.drop_pieces()
    assert grads.begun is None
    assert grads.take_rows(is_last=True) == [None] * 3
