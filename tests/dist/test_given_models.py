"""What `prepare` meets on a model, under every strategy: trained as in one process, or refused in one line."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Batch, adamw
from ranks import run_ranks
from simulated_graphs import simulated
from torch import Tensor, nn
from training import Case, assert_equal, line, on_ranks, one_process
from whole import strategies

import shardwise
from shardwise import Plan
from shardwise.engine.engine import engine_of

ALL = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int, rank: int) -> Batch:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return (x, x)


def loss_of(model: nn.Module, given: Batch) -> Tensor:
    return model(given[0]).square().mean()


def case_of(make: Callable[[], nn.Module], *, optimizer: Any = adamw, loss: Any = loss_of) -> Case:
    return Case(make=partial(_with_batch, make), optimizer=optimizer, loss=loss, num_steps=4)


def _with_batch(make: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    return make(), batch


def assert_trains_as_in_one_process(
    make: Callable[[], nn.Module], *, plan: Plan, num_ranks: int = 2, **options: Any
) -> None:
    case = case_of(make, **options)
    results = run_ranks(on_ranks, num_ranks=num_ranks, args=(case, plan, True))
    assert_equal(results, one_process(case, num_ranks=num_ranks))


# Views of parameters


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def as_attribute(model: Net, value: Any) -> str:
    model.blocks[1].seen = value
    return "blocks.1.seen"


def as_buffer(model: Net, value: Tensor) -> str:
    model.blocks[1].register_buffer("seen", value.detach())
    return "blocks.1.seen"


def on_parameter(model: Net, value: Tensor) -> str:
    model.first.bias.seen = value
    return "first.bias.seen"


def in_containers(model: Net, value: Tensor) -> str:
    model.seen = {"all": [1, (Holder(value),)]}
    return "seen['all'][1][0].held"


def as_frozen(model: Net, value: Tensor) -> str:
    model.seen = nn.Parameter(value.detach(), requires_grad=False)
    return "seen is frozen and shares the memory of blocks.1.up.weight"


PLACES = (as_attribute, as_buffer, on_parameter, in_containers, as_frozen)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda weight: weight.data,
    "flat": lambda weight: weight.view(-1),
    "row": lambda weight: weight.detach()[1],
    "column": lambda weight: weight.detach()[:, 1],
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
}


def refuses_views(rank: int) -> None:
    for strategy, place, view in itertools.product(ALL, PLACES, VIEWS):
        model = Net()
        name = place(model, VIEWS[view](model.blocks[1].up.weight))
        said = line(partial(shardwise.prepare, model, None, strategy, watch_seconds=0.0))
        assert name in said, (place, view)
        assert "blocks.1.up.weight" in said
    with torch.device("meta"):
        model = Net()
        as_buffer(model, model.first.weight)
    assert "blocks.1.seen is a view" in line(partial(shardwise.prepare, model, None, "fsdp", device="cpu"))


@pytest.mark.ledger("view-of-parameter", outcome="refused", under=ALL)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tensor_on_the_model_that_is_a_view_of_a_parameter_is_refused(num_ranks: int) -> None:
    run_ranks(refuses_views, num_ranks=num_ranks)


class HoldsItsOwn(Net):
    """Tensors that follow their parameter, and those that share no element with any."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = [self.first.weight]
        self.by_name = {"bias": self.first.bias}
        self.blocks[1].up.bias = self.blocks[0].up.bias
        self.start = self.first.weight.detach().clone()
        self.nothing = torch.empty(0)
        self.shape_only = torch.empty_like(self.first.weight, device="meta")
        both = torch.arange(2.0 * WIDTH).reshape(WIDTH, 2) * 0.1
        self.left = nn.Parameter(both[:, 0])
        self.register_buffer("right", both[:, 1])
        one = torch.arange(2.0 * WIDTH) * 0.1
        self.head = nn.Parameter(one[:WIDTH])
        self.register_buffer("tail", one[WIDTH:])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + self.left * self.right + self.head * self.tail
        return x @ self.trained[0] + self.by_name["bias"] * self.start.sum()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_parameters_in_lists_and_tensors_that_share_no_element_train_as_in_one_process(
    strategy: str, num_ranks: int
) -> None:
    assert_trains_as_in_one_process(HoldsItsOwn, plan=Plan(strategy=strategy, units="none"), num_ranks=num_ranks)


# Gradients from before


def refuses_gradients(rank: int) -> None:
    for strategy in ALL:
        model = Net()
        if rank == 0:
            loss_of(model, batch(0, rank)).backward()
            model.first.weight.requires_grad_(False)
        said = line(partial(shardwise.prepare, model, None, strategy, watch_seconds=0.0))
        assert "first.weight has a gradient from before shardwise.prepare" in said
        model.zero_grad()
        model.requires_grad_()
        shardwise.prepare(model, None, strategy, watch_seconds=0.0)


@pytest.mark.ledger("gradient-before-prepare", outcome="refused", under=ALL)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gradient_from_before_prepare_is_refused_until_it_is_cleared(num_ranks: int) -> None:
    run_ranks(refuses_gradients, num_ranks=num_ranks)


# Classes and attributes of parameters


class Doubled(nn.Parameter):
    """Counts for twice its values in every function of torch, as a class of weights may that is scaled."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = arguments
            with torch._C.DisableTorchFunctionSubclass():
                return nn.functional.linear(x, 2 * weight, bias)
        return super().__torch_function__(function, types, arguments, options or {})

    def is_doubled(self) -> bool:
        return True


class ByAttribute(torch.optim.SGD):
    """Reads attributes and classes of the parameters that it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = getattr(parameter, "rate", 0.5) * (3 if isinstance(parameter, Doubled) else 1)
                    with torch.no_grad():
                        parameter.sub_(rate * parameter.grad)


class ByWhole(ByAttribute):
    """Of a parameter that says so, the update of an element reads all others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if getattr(parameter, "by_norm", False) and parameter.grad is not None:
                parameter.grad = parameter.grad / (parameter.grad.norm() + 1)
        super().step()


def marked() -> Net:
    model = Net()
    for block in model.blocks:
        block.up.weight = Doubled(block.up.weight.detach().clone())
        block.up.weight.rate = 0.25
    model.first.bias.rate = 0.125
    return model


def by_norm() -> Net:
    model = marked()
    model.blocks[0].up.weight.by_norm = True
    return model


@pytest.mark.ledger("parameter-class", outcome="right")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("strategy", ALL)
def test_classes_and_attributes_of_parameters_reach_modules_and_optimizers(strategy: str, num_ranks: int) -> None:
    options = {"optimizer": partial(ByAttribute, lr=0.5)}
    assert_trains_as_in_one_process(marked, plan=Plan(strategy=strategy), num_ranks=num_ranks, **options)


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_an_update_that_reads_a_whole_parameter_for_its_attribute_is_found(strategy: str) -> None:
    options = {"optimizer": partial(ByWhole, lr=0.5)}
    assert_trains_as_in_one_process(by_norm, plan=Plan(strategy=strategy), **options)


def keeps_marks(rank: int, strategy: str) -> None:
    model = marked()
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.prepare(model, optimizer, strategy, watch_seconds=0.0)
    model.first.weight.set_later = True
    for _ in range(2):
        weight = model.blocks[0].up.weight
        assert isinstance(weight, Doubled)
        assert weight.is_doubled()
        assert type(weight).__name__ == "Doubled"
        assert weight.rate == 0.25
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        assert sum(getattr(p, "set_later", False) for p in stepped) <= 1
        assert all(isinstance(p, Doubled) for p in stepped if getattr(p, "rate", 0) == 0.25)
        if rank == 0:
            assert any(hasattr(p, "set_later") for p in stepped)
        loss_of(model, batch(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    copied = copy.deepcopy(model)
    assert type(copied) is Net
    assert type(copied.blocks[0].up.weight) is Doubled
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        model = marked()
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.prepare(model, optimizer, strategy, watch_seconds=0.0, device="cpu")
    assert isinstance(model.blocks[1].up.weight, Doubled)
    assert model.blocks[1].up.weight.rate == 0.25
    rates = [getattr(p, "rate", None) for group in optimizer.param_groups for p in group["params"]]
    assert 0.25 in rates or 0.125 in rates


@pytest.mark.parametrize("strategy", ALL)
def test_parameters_keep_their_class_and_attributes_through_steps_copies_and_the_meta_device(strategy: str) -> None:
    run_ranks(keeps_marks, num_ranks=2, args=(strategy,))


# Modules of torch.jit


class Leaves(Block):
    """Leaves an auxiliary loss on itself, which its output knows nothing of."""

    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.down(torch.relu(self.up(x))).square().mean()
        return x


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def compiled(how: str) -> nn.Module:
    x = torch.ones(3, WIDTH)
    model: Any = Net()
    if how == "script":
        return torch.jit.script(model)
    if how == "trace":
        return torch.jit.trace(model, x)
    if how == "scripted blocks":
        model.blocks = nn.ModuleList([torch.jit.script(block) for block in model.blocks])
    if how == "traced blocks":
        model.blocks = nn.ModuleList([torch.jit.trace(block, x) for block in model.blocks])
    if how == "a scripted layer":
        model.first = torch.jit.script(model.first)
    if how == "with batch norm":
        model.blocks = nn.ModuleList([torch.jit.script(Normed()), torch.jit.script(Normed())])
    return model


WAYS = ("script", "trace", "scripted blocks", "traced blocks", "a scripted layer", "with batch norm")


def trained_with_graphs(rank: int, make: Callable[[], nn.Module], strategy: str) -> tuple[int, int]:
    """Units as simulated CUDA graphs have the bits of units without; how many calls there were, and how many replays."""

    def run() -> tuple[dict[str, Tensor], tuple[int, int]]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="leaf"), watch_seconds=0.0)
        for step in range(10):
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs = engine_of(model).graphs
        counts = (graphs.num_calls, graphs.num_replayed) if graphs is not None else (0, 0)
        return shardwise.full_state_dict(model)["model"], counts

    without, _ = run()
    with simulated():
        graphed, counts = run()
    assert all(torch.equal(value, graphed[name]) for name, value in without.items())
    return counts


@pytest.mark.parametrize("how", ["class", "scripted blocks", "traced blocks", "a scripted layer", "script", "trace"])
@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_classes_of_parameters_and_scripted_modules_train_where_units_are_graphs(strategy: str, how: str) -> None:
    make = marked if how == "class" else partial(compiled, how)
    for num_calls, num_replayed in run_ranks(trained_with_graphs, num_ranks=2, args=(make, strategy)):
        # What is scripted stays an ordinary unit; in a scripted model nothing else is left.
        assert how in ("script", "trace") or num_replayed > num_calls / 10, (num_calls, num_replayed)


@pytest.mark.ledger("scripted", outcome="right")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_modules_of_torch_jit_train_as_in_one_process(strategy: str, how: str) -> None:
    units = "auto" if "layer" in how else "leaf"
    assert_trains_as_in_one_process(partial(compiled, how), plan=Plan(strategy=strategy, units=units))


@pytest.mark.parametrize("strategy", ALL)
def test_a_scripted_model_trains_as_in_one_process_on_one_rank(strategy: str) -> None:
    assert_trains_as_in_one_process(partial(compiled, "script"), plan=Plan(strategy=strategy), num_ranks=1)


def leaving() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList([torch.jit.script(Leaves()) for _ in range(3)])
    return model


def aux_loss(model: nn.Module, given: Batch) -> Tensor:
    model(given[0])
    loss: Tensor = model.blocks[1].aux + model.blocks[0].aux
    return loss


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_loss_that_a_scripted_block_leaves_on_itself_trains_as_in_one_process(strategy: str) -> None:
    plan = Plan(strategy=strategy, units="leaf", prefetch=0)
    assert_trains_as_in_one_process(leaving, plan=plan, loss=aux_loss)


def copies_and_refuses(rank: int, strategy: str) -> None:
    for how in ("script", "scripted blocks", "traced blocks"):
        model = compiled(how)
        optimizer = adamw(model.parameters())
        shardwise.prepare(model, optimizer, strategy, watch_seconds=0.0)
        loss_of(model, batch(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        copied = copy.deepcopy(model).state_dict()
        assert all(torch.equal(value, copied[name]) for name, value in model.state_dict().items())
        model.load_state_dict(copied)
    prepare = partial(shardwise.prepare, optimizer=None, watch_seconds=0.0)
    for units in ("class:Block", "auto + blocks.0"):
        said = line(partial(prepare, compiled("script"), plan=Plan(strategy=strategy, units=units)))
        assert "blocks.0 lies inside the model, which torch.jit compiled" in said
    plan = Plan(strategy=strategy, precision="bf16")
    said = line(partial(prepare, compiled("with batch norm"), plan=plan))
    assert "blocks.0.norm is to stay in fp32" in said
    assert "blocks.0, which torch.jit compiled" in said
    prepare(
        compiled("with batch norm"), plan=Plan(strategy=strategy, precision="bf16", keep_fp32=("blocks.0", "blocks.1"))
    )


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_a_scripted_model_is_copied_and_what_cannot_be_done_inside_it_is_refused(strategy: str) -> None:
    run_ranks(copies_and_refuses, num_ranks=2, args=(strategy,))
