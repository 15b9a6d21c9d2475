"""Modules in tiles along the sequence: the results of the same modules without."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from from_root import counted_as_large
from ranks import run_ranks
from torch import Tensor, nn
from whole import whole

import shardwise
from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.engine.activations.tiled import TiledHead
from shardwise.engine.activations.tiled_logits import TiledLogits
from shardwise.plan import Plan

WIDTH, LENGTH = 8, 21


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.mean(-2, keepdim=True))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(rank: int, options: dict[str, Any], *, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Any:
    model = Model(dropout).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    precision = "native" if dtype == torch.float64 else "fp32"
    shardwise.prepare(model, optimizer, Plan(**{"precision": precision, **options}))
    torch.manual_seed(3 + rank)
    losses = []
    for step in range(4):
        x = torch.randn(2, LENGTH, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, shardwise.full_state_dict(model)["model"]


def tiled_and_not(rank: int, strategy: str) -> float:
    (_, without), (_, tiled) = (
        trained(rank, {"strategy": strategy, "tile": tile}, dtype=torch.float64) for tile in ({}, {"*.mlp": 4})
    )
    return max(float((without[name] - tiled[name]).abs().max()) for name in without)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_tiled_module_trains_what_it_does_without_tiles(strategy: str) -> None:
    assert max(run_ranks(tiled_and_not, num_ranks=2, args=(strategy,))) < 1e-12


PLANS = [
    {"strategy": "zero2"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "recompute": "full"},
    {"strategy": "fsdp", "recompute": "selective"},
    {"strategy": "fsdp", "offload_activations": True},
]
COMPILED = [{"strategy": "shard_grad_op", "precision": "fp32", "compile": "aot_eager"}]


def same_under(rank: int, plans: list[dict[str, Any]]) -> list[str]:
    """Return the plans under which something differs from ddp, with dropout in the tiles."""
    tile = {"*.mlp": 4}
    losses, values = trained(rank, {"strategy": "ddp", "tile": tile}, dropout=0.2)
    differing = []
    for plan in plans:
        other_losses, other_values = trained(rank, {**plan, "tile": tile}, dropout=0.2)
        same = all(map(torch.equal, losses, other_losses))
        if not same or not all(torch.equal(values[name], other_values[name]) for name in values):
            differing.append(str(plan))
    return differing


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plans", [PLANS, *whole(COMPILED)], ids=["usual", "compiled"])
def test_every_plan_gives_the_bits_of_ddp_with_dropout_in_tiles(plans: list[dict[str, Any]]) -> None:
    assert run_ranks(same_under, num_ranks=2, args=(plans,)) == [[], []]


def in_bf16(rank: int) -> float:
    """Return the largest error of a weight's gradient that was added up over many tiles, relative to its largest."""
    x = torch.rand(1, 4096, WIDTH) + 1
    found = []
    for tile in ({}, {"0": 16}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 4)), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardwise.prepare(model, optimizer, Plan(strategy="ddp", precision="bf16", tile=tile, units="none"))
        model(x).sum().backward()
        found.append(model[0][0].weight.grad.double())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def test_gradients_of_many_tiles_are_added_up_in_the_reduce_dtype() -> None:
    # One rounding to bf16; 256 additions in bf16 would lose everything after the first few.
    assert run_ranks(in_bf16, num_ranks=1)[0] < 2**-7


def refused(rank: int, options: dict[str, Any]) -> str:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        shardwise.prepare(model, optimizer, Plan(**options))
        model(torch.randn(2, LENGTH, WIDTH))
    except (InvalidModel, InvalidPlan) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("tile", "line"),
    [
        ({"*.attention": 4}, "matches no module"),
        ({"blocks": 4}, "contains the unit blocks.0"),
        ({"blocks.0": 4}, "mixes tokens"),
    ],
)
def test_a_module_that_cannot_be_tiled_is_an_error(tile: dict[str, int], line: str) -> None:
    (said,) = run_ranks(refused, num_ranks=1, args=({"tile": tile},))
    assert line in said


# A head in tiles, and the loss after it


class Classifier(nn.Module):
    """Tokens' classes; the loss is computed inside, as in transformers, where classes are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if classes is None else nn.functional.cross_entropy(logits.view(-1, 11), classes.view(-1))


def outside(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), classes.flatten())


def shifted(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    logits = model(x)[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss(reduction="sum")(logits.reshape(-1, 11), classes[..., 1:].reshape(-1)) / 40


def otherwise(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """Everything that is not computed in tiles."""
    logits = model(x)
    first = (2 * logits - logits[0]).square().mean() + torch.stack([logits, logits]).logsumexp(-1).mean()
    return first + nn.functional.cross_entropy(logits.transpose(1, 2), classes, label_smoothing=0.1)


LOSSES = {
    "inside": lambda model, x, classes: model(x, classes),
    **{f.__name__: f for f in (outside, shifted, otherwise)},
}


def with_losses(rank: int, plan: dict[str, Any], tile: dict[str, int], *, is_large: bool) -> dict[str, Any]:
    found = {}
    for name, loss_of in LOSSES.items():
        model = Classifier().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        with counted_as_large(model.head.weight.numel()) if is_large else nullcontext():
            shardwise.prepare(model, optimizer, Plan(precision="native", tile=tile, **plan))
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
            classes = torch.randint(11, (2, LENGTH), generator=generator)
            # Not counted.
            classes[0, 3:7] = -100
            for number in range(plan.get("accumulate", 1)):
                with shardwise.accumulate(model, enabled=number + 1 < plan.get("accumulate", 1)):
                    loss = loss_of(model, x, classes)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found[name] = torch.stack(losses), shardwise.full_state_dict(model)["model"]
    return found


def heads_differ(rank: int, plan: dict[str, Any], is_large: bool) -> float:
    without, tiled = (with_losses(rank, plan, tile, is_large=is_large) for tile in ({}, {"head": 4, "*.mlp": 8}))
    return max(
        float((value - tiled[loss][1][name]).abs().max())
        for loss, (_, values) in without.items()
        for name, value in values.items()
    )


@pytest.mark.parametrize(
    ("plan", "is_large"),
    [
        ({"strategy": "ddp"}, False),
        ({"strategy": "fsdp", "accumulate": 2}, False),
        ({"strategy": "fsdp", "accumulate": 2}, True),
        *whole(
            ({"strategy": "zero2"}, True),
            ({"strategy": "fsdp", "recompute": "full", "offload_activations": True}, False),
            ({"strategy": "fsdp", "recompute": "full", "offload_activations": True}, True),
        ),
    ],
    ids=str,
)
def test_a_tiled_head_trains_what_it_does_without_tiles_with_any_loss(plan: dict[str, Any], is_large: bool) -> None:
    assert max(run_ranks(heads_differ, num_ranks=2, args=(plan, is_large))) < 1e-12


def test_logits_of_a_tiled_head_never_exist_where_a_cross_entropy_follows() -> None:
    sizes: list[int] = []

    model = Classifier()
    tiled = TiledHead(model.head, name="head", tokens=5, dtype=torch.float32, verifies=True)
    head = tiled.inner

    def counted(x: Tensor) -> Tensor:
        sizes.append(x.shape[-2])
        return head(x)

    tiled.inner = counted
    x = torch.randn(2, LENGTH, WIDTH)
    logits = tiled(x)
    assert isinstance(logits, TiledLogits)
    assert (logits.shape, logits.dtype, logits.device) == ((2, LENGTH, 11), torch.float32, x.device)
    classes = torch.zeros(2 * LENGTH, dtype=torch.int64)
    nn.functional.cross_entropy(logits.float().view(-1, 11), classes).backward()
    assert max(sizes) == 5
    # In forward, and again in backward.
    assert sum(sizes) == 2 * LENGTH
    assert model.head.weight.grad is not None
    with pytest.raises(ValueError, match="to match target batch_size"):
        nn.functional.cross_entropy(logits.view(-1, 11), classes[1:])
    with torch.no_grad():
        # Of single tiles: a product of more rows may round otherwise.
        assert torch.equal(tiled(x), torch.cat([model.head(part) for part in x.split(5, dim=-2)], dim=-2))
