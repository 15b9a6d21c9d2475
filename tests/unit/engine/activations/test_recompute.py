"""What a recomputed unit keeps, what it computes again, and what it leaves as it was."""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.live_bytes import Ledger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwise.engine.activations.recompute import recompute_unit
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape

MODES = ("none", "full", "selective")
each_mode = pytest.mark.parametrize("mode", MODES[1:])
SHAPE = GPTShape(num_layers=1, width=32, num_heads=2, vocab_size=16, max_seq=8)


def block() -> nn.Module:
    torch.manual_seed(0)
    return build_model(SHAPE).blocks[0]


def grads(module: nn.Module, *inputs: Tensor, mode: str) -> list[Tensor]:
    """Gradients of everything, after two steps through the wrapped module, of which the first may learn."""
    undo = recompute_unit(module, mode=mode) if mode != "none" else lambda: None
    found = []
    for time in range(2):
        torch.manual_seed(time)
        module.zero_grad()
        fresh = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        module(*fresh).square().mean().backward()
        found += [p.grad.clone() for p in (*module.parameters(), *fresh) if p.grad is not None]
    undo()
    return found


def assert_all_modes_agree(make: Callable[[], nn.Module], *inputs: Tensor) -> None:
    found = []
    for mode in MODES:
        torch.manual_seed(0)
        found.append(grads(make(), *inputs, mode=mode))
        assert len(found[-1]) > 0
        assert_same(found[-1], found[0])


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def ran_in_backward(module: nn.Module, x: Tensor, *, mode: str) -> Any:
    """The operations of the second step's backward."""
    undo = recompute_unit(module, mode=mode) if mode != "none" else lambda: None
    module(x).sum().backward()
    loss = module(x).sum()
    with Ledger() as ledger:
        loss.backward()
    undo()
    return ledger.counts


def live_after_forward(module: nn.Module, x: Tensor, *, mode: str, num_steps: int) -> int:
    undo = recompute_unit(module, mode=mode) if mode != "none" else lambda: None
    for _ in range(num_steps):
        with Ledger() as ledger:
            output = module(x)
        live_bytes = ledger.live_bytes(besides=[x, output, *module.parameters()])
        output.sum().backward()
        assert ledger.live_bytes(besides=[x, output, *module.parameters()]) == 0
    undo()
    return live_bytes


def test_full_keeps_nothing_but_its_inputs() -> None:
    assert live_after_forward(block(), torch.randn(3, 8, 32, requires_grad=True), mode="full", num_steps=2) == 0


def test_selective_keeps_products_and_attention_and_from_the_second_step_not_the_last() -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)
    stream = x.nbytes
    statistics = 3 * 8 * 2 * 4  # attention's log-sum-exp: batch × seq × heads
    # qkv, attention, its projection, up, down.
    assert live_after_forward(block(), x, mode="selective", num_steps=1) == (3 + 1 + 1 + 4 + 1) * stream + statistics
    assert live_after_forward(block(), x, mode="selective", num_steps=2) == (3 + 1 + 1 + 4) * stream + statistics
    assert live_after_forward(block(), x, mode="none", num_steps=2) > 15 * stream


def test_selective_runs_no_product_again() -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)
    none, full, selective = (ran_in_backward(block(), x, mode=mode) for mode in MODES)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert selective["mm"] == none["mm"] == 8
    assert selective["addmm"] == selective[attention] == 0
    assert selective["gelu"] == full["gelu"] == 1
    # The last product is not needed for backward, so that full does not run it again either.
    assert (full["addmm"], full[attention]) == (3, 1)


@each_mode
def test_without_early_stop_everything_is_recomputed_to_the_end(mode: str) -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)
    with set_checkpoint_early_stop(False):
        counts = ran_in_backward(block(), x, mode=mode)
        assert_all_modes_agree(block, x)
    assert counts["addmm"] == (4 if mode == "full" else 0)
    assert counts["add"] >= 2


class Fickle(nn.Module):
    """Takes another path each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.num_layers = 2

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.num_layers]:
            x = torch.sigmoid(layer(x))
        return x


def test_a_unit_that_takes_another_path_later_is_still_right() -> None:
    x = torch.randn(4, 6)
    found: dict[str, list[Tensor]] = {}
    for mode in MODES:
        torch.manual_seed(0)
        module = Fickle()
        undo = recompute_unit(module, mode=mode) if mode != "none" else lambda: None
        for module.num_layers in (2, 5, 1, 4):
            module.zero_grad()
            module(x).sum().backward()
            found.setdefault(mode, []).extend(p.grad.clone() for p in module.parameters() if p.grad is not None)
        undo()
    for mode in MODES[1:]:
        assert_same(found[mode], found["none"])


class Overwriting(nn.Module):
    """Activations that write over what a product gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.relu(self.first(x), inplace=True))).tanh_()


def test_an_output_that_was_written_over_is_computed_again() -> None:
    assert_all_modes_agree(Overwriting, torch.randn(4, 6, requires_grad=True))
    x = torch.randn(4, 6, requires_grad=True)
    assert ran_in_backward(Overwriting(), x, mode="selective")["addmm"] == 1
    # And it is not kept for nothing.
    assert live_after_forward(Overwriting(), x, mode="selective", num_steps=2) == 4 * 6 * 4


@torch.library.custom_op("shardwise_test::noisy_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy_attention(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def _noisy_backward(ctx: Any, grad: Tensor) -> Tensor:
    output, x = ctx.saved_tensors
    return grad * output / x


noisy_attention.register_autograd(
    _noisy_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[0])
)


class Noisy(nn.Module):
    """As attention with dropout on a GPU: one operation that draws random numbers, and others after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = noisy_attention(self.first(F.dropout(x, 0.3)))
        return F.dropout(x, 0.3).tanh() * x


def test_random_numbers_after_kept_attention_are_those_of_the_forward() -> None:
    assert_all_modes_agree(Noisy, torch.randn(4, 6, requires_grad=True))


class Counting(nn.Module):
    """Reads what it changes: a buffer, which the result depends on, and an attribute that holds a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(()))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.5)
        x = torch.tanh(self.norm(self.linear(x)) * self.scale)
        self.loss = x.square().sum()
        return x * self.scale


@each_mode
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_finds_buffers_as_they_were_and_leaves_no_trace(mode: str, early_stop: bool) -> None:
    x = torch.randn(4, 6)
    with set_checkpoint_early_stop(early_stop):
        assert_all_modes_agree(Counting, x)
        plain, module = Counting(), Counting()
        module.load_state_dict(plain.state_dict())
        recompute_unit(module, mode=mode)
        for each in (plain, module):
            y = each(x)
            loss = each.loss
            (y.sum() + loss).backward()
            assert each.loss is loss
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@each_mode
def test_one_graph_may_be_gone_back_through_twice_and_partly(mode: str) -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)
    module = block()
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    recompute_unit(module, mode=mode)
    for _ in range(2):
        loss = module(x).square().sum()
        for keep in (True, True, False):
            found = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=keep)
            assert_same(found, expected)
    output = module(x)
    first, second = output[:1].square().sum(), output[1:].square().sum()
    # Two backwards that do not say that a graph is kept, and share none of it but the unit.
    parts = [torch.autograd.grad(part, x, retain_graph=part is first)[0] for part in (first, second)]
    torch.testing.assert_close(parts[0] + parts[1], expected[0])


@each_mode
def test_autocast_is_the_same_in_a_recomputation(mode: str) -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)
    found = {}
    for each in ("none", mode):
        module = block()
        undo = recompute_unit(module, mode=each) if each != "none" else lambda: None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(x)
        found[each] = torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])
        undo()
    assert_same(found[mode], found["none"])


@each_mode
def test_a_users_own_checkpoint_may_lie_around_a_unit_or_within_it(mode: str) -> None:
    x = torch.randn(3, 8, 32, requires_grad=True)

    class Around(nn.Module):
        def __init__(self, *, inside: bool) -> None:
            super().__init__()
            self.block = block()
            target = self.block.feed_forward if inside else self.block
            forward = target.forward
            if inside:
                target.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) if self.inside else checkpoint(self.block, x, use_reentrant=False)

    expected = grads(block(), x, mode="none")
    for inside in (True, False):
        module = Around(inside=inside)
        recompute_unit(module.block, mode=mode)
        found = grads(module, x, mode="none")
        assert_same(found, expected)


@each_mode
def test_parameters_that_are_updated_before_backward_are_refused(mode: str) -> None:
    module = block()
    recompute_unit(module, mode=mode)
    loss = module(torch.randn(3, 8, 32)).sum()
    with torch.no_grad():
        module.norm1.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a parameter of Block"):
        loss.backward()


def test_what_a_unit_computes_in_inference_mode_is_computed_again() -> None:
    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taught, self.teacher, self.other = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                # Torch counts no write to it.
                wanted = self.teacher(x).add_(1).relu_()
            return torch.tanh(self.other(torch.tanh(self.taught(x)) + wanted))

    assert_all_modes_agree(Teaching, torch.randn(3, 8))


@each_mode
def test_without_gradients_the_forward_is_called_as_it_is(mode: str) -> None:
    module = block()
    x = torch.randn(3, 8, 32)
    expected = module(x)
    recompute_unit(module, mode=mode)
    with torch.no_grad(), Ledger() as ledger:
        assert torch.equal(module(x), expected)
    assert ledger.live_bytes(besides=list(module.parameters())) == 0
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


@each_mode
def test_undone_the_module_is_as_it_was_and_can_be_copied(mode: str) -> None:
    module = block()
    before = inspect.signature(module.forward)
    undo = recompute_unit(module, mode=mode)
    undo_second = recompute_unit(module, mode=mode)
    assert inspect.signature(module.forward) == before
    assert module.forward.__doc__ == type(module).forward.__doc__
    undo_second()
    undo()
    assert "forward" not in module.__dict__
    twin = copy.deepcopy(module)
    assert twin.forward.__self__ is twin
