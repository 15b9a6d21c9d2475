"""Two models that share an encoder, each with layers of its own; importable by ranks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class SharedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(SharedLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class OnEncoder(nn.Module):
    """An encoder, and what is this model's own."""

    def __init__(self, encoder: SharedEncoder, *, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.layers = nn.ModuleList(SharedLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_pair() -> nn.ModuleDict:
    torch.manual_seed(5)
    encoder = SharedEncoder()
    return nn.ModuleDict({"one": OnEncoder(encoder, outputs=3), "other": OnEncoder(encoder, outputs=2)})


def loss_of(models: nn.ModuleDict, name: str, *, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank + len(name))
    return models[name](torch.randn(4, 5, generator=generator)).square().mean()


# For each backward of a step, the models whose losses it is of; the optimizers of those are stepped.
SCHEDULES: dict[str, Callable[[int], list[tuple[str, ...]]]] = {
    "sum": lambda step: [("one", "other")],
    "turns": lambda step: [("one", "other")[step % 2 : step % 2 + 1]],
    "apart": lambda step: [("one",), ("other",)],
}
NUM_STEPS = 4


def make_optimizers(models: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    """Each holds the encoder, too."""
    return {
        "one": torch.optim.SGD(models["one"].parameters(), lr=0.1, momentum=0.9),
        "other": torch.optim.AdamW(models["other"].parameters(), lr=0.01),
    }


def trained_in_one_process(schedule: str, *, num_ranks: int = 2) -> dict[str, Tensor]:
    """Each backward's gradients are the mean over the ranks' micro-batches; those of several backwards add up."""
    models = make_pair()
    optimizers = make_optimizers(models)
    parameters = list(models.parameters())
    for step in range(NUM_STEPS):
        passes = SCHEDULES[schedule](step)
        total: list[Tensor | None] = [None] * len(parameters)
        for names in passes:
            sums: list[Tensor | None] = [None] * len(parameters)
            for rank in range(num_ranks):
                loss = sum(loss_of(models, name, step=step, rank=rank) for name in names)
                assert isinstance(loss, Tensor)
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                sums = [_added(one, other) for one, other in zip(sums, grads, strict=True)]
            means = [None if one is None else one * (1 / num_ranks) for one in sums]
            total = [_added(one, other) for one, other in zip(total, means, strict=True)]
        for parameter, grad in zip(parameters, total, strict=True):
            parameter.grad = grad
        for name in dict.fromkeys(name for names in passes for name in names):
            optimizers[name].step()
        models.zero_grad()
    return dict(models.state_dict())


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other
