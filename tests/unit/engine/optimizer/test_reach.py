"""How far an optimizer's update looks is found out by trying it, not by its name."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import given_optimizers as own
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.engine.optimizer.known import Stepped, judge
from shardwise.engine.optimizer.reach import NUM_STEPS, Reach, Verdict, probe

CPU = torch.device("cpu")
ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "a user's Lion": own.Lion,
    "an empty subclass": partial(own.Plain, lr=1e-2),
    "a learning rate of 0": partial(own.Lion, lr=0.0),
    **{
        f"torch's {kind.__name__}": partial(kind, lr=1e-2)
        for kind in (
            *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
            *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, torch.optim.ASGD, torch.optim.Adadelta),
        )
    },
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "one that steps only after its train()": own.Switched,
}
BY_TENSOR: dict[str, Callable[[Any], Optimizer]] = {
    "cautious Lion": own.CautiousLion,
    "cautious Lion with a learning rate of 0": partial(own.CautiousLion, lr=0.0),
    "LARS as a subclass of SGD": partial(own.Lars, lr=0.1, momentum=0.9),
    "LAMB": own.Lamb,
    "an update that is clipped when it is huge": own.UpdateClipping,
    "a floor for tiny gradients": own.TinyFloor,
    "torch's Adafactor": torch.optim.Adafactor,
    "torch's Muon": partial(torch.optim.Muon, ns_steps=1),
    "Shampoo": own.Shampoo,
    "blocks larger than any alignment": partial(own.BlockAdam, block=8192),
    "8-bit states of full blocks only, as torchao's": own.FullBlockAdam,
}


def tried(make: Callable[[Any], Optimizer], *, num_dims: int = 2) -> Verdict:
    optimizer = make([nn.Parameter(torch.ones((2,) * num_dims))])
    return probe(optimizer, group=0, num_dims=num_dims, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_optimizer_may_be_cut_where_slices_are(name: str) -> None:
    assert tried(ELEMENTWISE[name]) == Verdict(reach=Reach.ELEMENT, alignment=ALIGNMENT)


@pytest.mark.parametrize("name", BY_TENSOR)
def test_an_optimizer_that_looks_at_its_tensor_is_found_out(name: str) -> None:
    assert tried(BY_TENSOR[name]) == Verdict(reach=Reach.TENSOR)


@pytest.mark.parametrize("kind", [own.Prodigy, own.LayerDecay, own.Noisy])
def test_an_optimizer_that_looks_beyond_its_tensor_is_found_out(kind: Any) -> None:
    assert tried(kind) == Verdict(reach=Reach.MODEL)


@pytest.mark.parametrize("block", [64, 256, 2048])
def test_an_optimizer_of_blocks_may_be_cut_between_them(block: int) -> None:
    assert tried(partial(own.BlockAdam, block=block)) == Verdict(reach=Reach.ELEMENT, alignment=block)


def test_an_optimizer_that_cannot_be_tried_says_why() -> None:
    assert "does not step the parameters in its param_groups" in tried(own.Elsewhere).why
    assert "closure" in tried(torch.optim.LBFGS).why
    assert "RuntimeError" in tried(torch.optim.SparseAdam).why


class Packed(torch.Tensor):
    """A state of a class of its own, as torchao's 8-bit states."""


class PackedStates(own.Lion):
    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        if p.numel() % 256 == 0:
            state.setdefault("packed", torch.zeros_like(p).as_subclass(Packed))
        super().update(p, g, state, options)


def test_states_that_ranks_cannot_cut_are_refused_by_their_class() -> None:
    verdict = tried(PackedStates)
    assert verdict.reach is Reach.MODEL
    assert verdict.why.startswith("its states are Packed, a class of tensors that ranks can neither cut nor send")


def test_parameters_of_other_dimensions_have_a_verdict_of_their_own() -> None:
    model = nn.Linear(4, 4)
    optimizer = own.ByDimensions(model.parameters())
    stepped = {id(p): Stepped(sharded=True, dtype=torch.float32) for p in model.parameters()}
    verdicts = judge(optimizer, stepped=stepped, device=CPU)
    assert verdicts[id(model.weight)].reach is Reach.TENSOR
    assert verdicts[id(model.bias)].reach is Reach.ELEMENT


def test_groups_have_verdicts_of_their_own() -> None:
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "block": 256}, {"params": [model.bias], "block": 512}]
    stepped = {id(p): Stepped(sharded=True, dtype=torch.float32) for p in model.parameters()}
    verdicts = judge(own.BlockAdam(groups), stepped=stepped, device=CPU)
    assert [verdicts[id(p)].alignment for p in (model.weight, model.bias)] == [256, 512]


def test_a_trial_leaves_the_optimizer_its_hooks_and_random_numbers_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = own.Noisy([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: called.append("any"))
    groups = copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.get_rng_state(), random.getstate())
    assert probe(optimizer, group=0, num_dims=2, dtype=torch.float32, device=CPU).reach is Reach.MODEL
    everywhere.remove()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert not called
    assert not optimizer.state
    assert optimizer.state_dict() == groups
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(3, 3))
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["params"] == [parameter]


class HalfProducts(own.Lion):
    """What a product in bf16 (Muon's) does on a CPU without bf16: torch stops using oneDNN."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        torch._C._set_mkldnn_enabled(False)
        super().update(p, g, state, options)


def test_a_trial_leaves_the_cpus_kernels_alone() -> None:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        tried(HalfProducts)
        assert torch._C._get_mkldnn_enabled()
    finally:
        torch._C._set_mkldnn_enabled(before)


class Counted(own.Lion):
    steps = 0

    def update(self, *given: Any) -> None:
        type(self).steps += 1
        super().update(*given)


def test_a_class_with_the_same_options_is_tried_once_in_a_process() -> None:
    Counted.steps = 0

    def judged(**options: Any) -> int:
        model = nn.Linear(4, 4)
        stepped = {id(p): Stepped(sharded=True, dtype=torch.float32) for p in model.parameters()}
        judge(Counted(model.parameters(), **options), stepped=stepped, device=CPU)
        return Counted.steps

    # Of matrices and of vectors: one whole, one alone, two together, four pieces; and one whole and three pieces.
    once = 2 * NUM_STEPS * (1 + 1 + 2 + 4 + 1 + 3)
    assert judged() == once
    assert judged() == once
    assert judged(decay=0.5) == 2 * once
    # What text does not tell is tried each time, once for each kind of parameter.
    assert judged(decay=lambda: 1) == 3 * once
    assert judged(decay=lambda: 1) == 4 * once


def test_torchs_own_elementwise_classes_are_trusted_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    stepped = {id(p): Stepped(sharded=True, dtype=torch.float32) for p in model.parameters()}
    monkeypatch.setattr("shardwise.engine.optimizer.known.probe", lambda *_, **__: pytest.fail("it was tried"))
    verdicts = judge(torch.optim.AdamW(model.parameters()), stepped=stepped, device=CPU)
    assert {verdict.reach for verdict in verdicts.values()} == {Reach.ELEMENT}
