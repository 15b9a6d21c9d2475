"""Programs whose units make, return or are given tensors of unusual kinds (escaping.py)."""

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def deepcopy_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"scales": [1.0, 0.5]}

        def forward(self, x: Tensor) -> Tensor:
            settings = copy.deepcopy(self.settings)
            settings["scales"].append(0.25)
            return super().forward(x * sum(settings["scales"]))

    return loop(prepare, Net(Own), after=lambda step, net: [len(net.blocks[0].settings["scales"])])


@program
def writes_into_a_view_of_its_input(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[:, :4].mul_(0.5)
            x.t()[4:].add_(1)
            return super().forward(x)

    return loop(prepare, Net(Own))


@program
def writes_into_a_view_of_a_given_tensor(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            seen[0] += x.detach().mean()
            seen.view(-1)[1:].mul_(0.9)
            return super().forward(x + seen.sum() / 100)

    seen = torch.ones(3)

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        return net(x, seen=seen).square().mean()

    return loop(prepare, Net(Own), loss=loss, after=lambda step, net: [seen.clone()])


@program
def result_that_is_not_contiguous(prepare: Prepare) -> list[Any]:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x).t()
        return x

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).t()

    return loop(prepare, Net(Own, run=run), after=lambda step, net: [])


@program
def expanded_result(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return found, found.mean(0, keepdim=True).expand(4, -1)

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, mean = block(x)
            x = x + mean
        return x

    return loop(prepare, Net(Own, run=run))


@program
def complex_between_units(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x.real if x.is_complex() else x)
            return torch.complex(found, found.cos())

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x.abs()

    return loop(prepare, Net(Own, run=run))


@program
def fourier_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=8))

    return loop(prepare, Net(Own))


@program
def numbers_and_flags_out(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return found, found.argmax(-1), found > 0

    counts: list[Tensor] = []

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, largest, positive = block(x)
            counts.append(largest.sum() + positive.sum())
        return x

    return loop(prepare, Net(Own, run=run), after=lambda step, net: counts[-3:])


@program
def empty_tensor_out(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x[:0], x.new_zeros(0, 3)

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, nothing, none = block(x)
            x = x + nothing.sum() + none.sum()
        return x

    return loop(prepare, Net(Own, run=run))


class _Result(OrderedDict[str, Any]):
    """A result whose entries are attributes too, as transformers' ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@program
def result_of_its_own_class(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return _Result(hidden=super().forward(x), norm=x.norm())

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            found = block(x)
            x = found.hidden / (1 + found["norm"])
        return x

    return loop(prepare, Net(Own, run=run))


@program
def sparse_inside(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.eye(8).to_sparse()
            return super().forward(torch.sparse.mm(kept, x.t()).t())

    return loop(prepare, Net(Own))


class _Tagged(Tensor):
    """A tensor of its own class."""


@program
def tensor_subclass_as_an_argument(prepare: Prepare) -> list[Any]:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x.as_subclass(_Tagged))
        return x.as_subclass(Tensor)

    return loop(prepare, Net(run=run))


@program
def detached_in_place(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.inner(x).abs().mean()
            scale.detach_()
            return super().forward(x / (1 + scale))

    return loop(prepare, Net(Own))


@program
def parameter_made_from_data(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(self.inner(x), self.down.weight.data, self.down.bias)

    return loop(prepare, Net(Own))


@program
def value_by_numpy(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            scale = float(x.detach().numpy().std())
            return super().forward(x / (1 + scale))

    return loop(prepare, Net(Own))


@program
def gathered_by_a_mask(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept = x[x[:, 0] > 0]
            return x + self.down(self.inner(kept)).sum(0)

    return loop(prepare, Net(Own))


@program
def print_of_a_value(prepare: Prepare) -> list[Any]:
    texts: list[str] = []

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            texts.append(f"{x.detach().mean():.3f}")
            return super().forward(x)

    return loop(prepare, Net(Own), after=lambda step, net: [float(text) for text in texts[-3:]])


@program
def assertion_on_values(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.isnan(x).any(), "not a number"
            return super().forward(x)

    return loop(prepare, Net(Own))
