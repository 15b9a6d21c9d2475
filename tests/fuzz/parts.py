"""Small models, put together from parts that are awkward to shard. A description is a value; `make` builds its module.

Inputs are (samples, TIME, WIDTH). A part is a unit of the model, `parts.N`; `first` and `head` belong to the root.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from python_parts import ELSEWHERE, HOOKS, OTHERS, SETTINGS, WRITING, Penalised, hook
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4
TIME = 3

# x, y, and the key that decides which parts are called.
Batch = dict[str, Any]
USES = ("once", "twice", "never", "sometimes")
FROZEN = ("nothing", "some", "all")
HOOKED = ("nothing", *HOOKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One block: a kind of PARTS, how it is called, what of it is frozen, and whether its weight is that of part 0.

    uses           sometimes: in every other call of the model, on alternating ranks
    hooked         how an inner module is hooked before the model is prepared
    checkpointed   the model calls it inside of torch.utils.checkpoint
    """

    kind: str
    uses: str = "once"
    frozen: str = "nothing"
    tied: bool = False
    hooked: str = "nothing"
    checkpointed: bool = False

    def features(self) -> set[str]:
        flags = {"tied": self.tied, "checkpointed": self.checkpointed, f"hooked {self.hooked}": True}
        found = {name for name, is_set in flags.items() if is_set}
        return {f"part {self.kind}", f"used {self.uses}", f"frozen {self.frozen}", *found}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Square(nn.Module):
    """Its weight has the shape that parts can share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.up(x))


class Gated(nn.Module):
    """Writes in place into two chunks of one storage, as torch's GRU cell does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = torch.unsafe_chunk(self.up(x), 2, -1)
        return x + gate.sigmoid_() * value.tanh_()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without a bias: it has no gradient but rounding, which Adam scales up.
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))


class Looked(nn.Module):
    """An embedding, looked up by the signs of the input."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, max_norm=max_norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() > 0).sum(-1))


class Clamped(Square):
    """Clamps its weight in each training forward, as a critic of a WGAN does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.up.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.up(x))


class Parametrised(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up = wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Adapted(nn.Module):
    """A frozen layer with a trained adapter next to it, and a frozen scale: a unit that is partly frozen, as by LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
        for module in (self.norm, self.base):
            module.requires_grad_(False)
        self.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + torch.tanh(self.base(normed) + self.adapter(normed)) * self.scale


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: that of the keys has no gradient but rounding, which Adam scales up.
        self.both = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.both(x, x, x, need_weights=False)[0]


class Convolved(nn.Module):
    """Over time; its output is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


class Named(nn.Module):
    """Takes keywords and returns a dict, of which one value is not differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, factor: float) -> dict[str, Tensor]:
        found = hidden + factor * torch.tanh(self.up(hidden))
        return {"hidden": found, "largest": found.detach().argmax(-1)}


class Calling(nn.Module):
    """Calls one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Named()
        self.right = self.left

    def forward(self, x: Tensor) -> Tensor:
        return self.right(hidden=self.left(hidden=x, factor=0.5)["hidden"], factor=0.25)["hidden"]


class Odd(Square):
    """Parameters with no element, with one, and with no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one) + self.nothing.sum()


class Nested(nn.Module):
    """Calls a block inside, and returns a tuple to its caller in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Pair()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.inside(x)
        return x + self.out(left * right)


class Wide(nn.Module):
    """Layers whose sizes are multiples of 16, as fp8 products need them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.norm(x.repeat_interleave(16 // WIDTH, dim=-1))
        return x + self.down(torch.tanh(self.up(wide))).unflatten(-1, (WIDTH, -1)).mean(-1)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "square": Square,
    "gated": Gated,
    "recurrent": Recurrent,
    "layer norm": Normed,
    "batch norm": BatchNormed,
    "embedding": Looked,
    "max_norm": lambda: Looked(max_norm=1.0),
    "clamped": Clamped,
    "dropout": Dropped,
    "weight norm": lambda: Parametrised(parametrizations.weight_norm),
    "spectral norm": lambda: Parametrised(parametrizations.spectral_norm),
    "adapted": Adapted,
    "attention": Attending,
    "convolution": Convolved,
    "shared module": Calling,
    "odd shapes": Odd,
    "nested": Nested,
    "wide": Wide,
    "keywords": Named,
    **{kind: partial(made, WIDTH) for kind, made in (SETTINGS | WRITING | ELSEWHERE | OTHERS).items()},
}
# Kinds that take or return other things than one tensor, and how they are called.
CALLS: dict[str, Callable[[Callable[..., Any], Tensor], Tensor]] = {
    "keywords": lambda call, x: call(hidden=x, factor=0.5)["hidden"],
    "listed": lambda call, x: torch.add(*call([x, 0.5 * x])),
    "keyed": lambda call, x: (found := call({"hidden": x, "pair": (x + 1, [x])}))["hidden"] + found["others"][0],
}
# Kinds whose weight `up.weight` can be that of another of these.
SQUARE = ("square", "clamped", "odd shapes")

# Kinds of a second model: nothing of them is kept from one forward to the next.
OTHER_MODEL = ("plain", "square", "gated", "recurrent", "layer norm", "dropout", "nested", "keywords", "keyed")
# Kinds that write buffers in forward.
BUFFERS = ("batch norm", "spectral norm")
# Kinds that are refused under some or all strategies; drawn less often.
REFUSED = ("max_norm", "clamped")


class Model(nn.Module):
    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(PARTS[part.kind]() for part in parts)
        self.head = nn.Linear(WIDTH, 1)
        self.described = parts
        for part, module in zip(parts, self.parts, strict=True):
            if part.tied:
                module.up.weight = self.parts[0].up.weight
            if part.frozen != "nothing":
                freeze(module, part.frozen)
            if part.hooked != "nothing":
                hook(module, part.hooked)

    def forward(self, x: Tensor, key: int) -> Tensor:
        x = self.first(x)
        for number, (part, module) in enumerate(zip(self.described, self.parts, strict=True)):
            if part.uses == "never" or (part.uses == "sometimes" and (key + number) % 2):
                continue
            for _ in range(1 + (part.uses == "twice")):
                x = self._call(part, module, x)
        return self.head(x)

    def _call(self, part: Part, module: nn.Module, x: Tensor) -> Tensor:
        call = partial(checkpoint, module, use_reentrant=False) if part.checkpointed else module
        return CALLS[part.kind](call, x) if part.kind in CALLS else call(x)

    def loss_of(self, batch: Batch) -> Tensor:
        """A method that can stand for the forward (shardwise.forward_method)."""
        return loss_of(self, batch)


def loss_of(model: nn.Module, batch: Batch, *, also: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the loss of a batch; `also` adds to it what another model makes of the model's output."""
    lists = [module.losses for module in model.modules() if isinstance(module, Penalised)]
    for losses in lists:
        losses.clear()
    output = model(batch["x"], batch["key"])
    found: Tensor = (output - batch["y"]).square().mean()
    if also is not None:
        found = found + also(output)
    return sum((loss / 10 for losses in lists for loss in losses), found)


def judged(output: Tensor, *, other: nn.Module, batch: Batch, how: str) -> Tensor:
    """Return what another model adds to the loss: as a teacher, or as a critic of the output that is trained as well."""
    if how == "critic":
        return other(output.expand(-1, -1, WIDTH), batch["key"]).square().mean()
    with torch.no_grad():
        wanted = other(batch["x"], batch["key"])
    return (output - wanted).square().mean()


def freeze(module: nn.Module, how: str) -> None:
    """Freeze nothing, all, or the first parameter and every second one after it."""
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(how == "nothing" or (how == "some" and number % 2 == 1))


def make(parts: tuple[Part, ...], *, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(parts)
