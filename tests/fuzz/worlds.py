"""What the worlds have in common in which a case runs: a rank of a prepared job (rank_world.py), and its oracle, one
process of plain torch (one_process.py).

Both have the same methods, one for each kind of event. What a method returns is compared: {label: value} of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from compositions import SIZES, Case, Event
from parts import WIDTH, Batch, Model, freeze, make
from python_parts import hook, memory_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Observed = dict[str, Any]
MAX_NORM, CLIP_VALUE, FACTOR, DECAY = 0.5, 0.01, 0.9, 0.5


class World:
    """The model, its optimizer, batches, and the count of forwards, which seeds each of them.

    extended   the model's head was replaced after it was prepared
    changes    what events have changed in Python: (method, part, value)
    sizes      the rows and lengths of batches, by turns
    """

    def __init__(self, case: Case, *, num_ranks: int, device: torch.device) -> None:
        self.case = case
        self.num_ranks = num_ranks
        self.device = device
        self.dtype = torch.float64 if case.double else torch.float32
        self.extended = False
        self.changes: list[tuple[str, int, Any]] = []
        self.sizes = SIZES["usual"]
        self.model = self.make_model(case.seed)
        self.optimizer = self.make_optimizer(self.model)
        self.keys = dict(case.plan)
        # A second model, from the first event that uses one on.
        self.other: Model | None = None
        self.num_forwards = 0
        self.averages: Any = None

    def make_model(self, seed: int) -> Model:
        model = make(self.case.parts, seed=seed).to(self.device, self.dtype)
        for change in self.changes:
            _change(model, *change)
        return model

    def second(self) -> Model:
        """Return the second model."""
        if self.other is None:
            other = make(self.case.other_parts, seed=self.case.seed + 3).to(self.device, self.dtype)
            self.other_optimizer = self.make_optimizer(other)
            self.prepare_second(other)
            self.other = other
        return self.other

    def prepare_second(self, other: Model) -> None:
        """Make the second model part of this world."""

    def weights_of_second(self) -> dict[str, Any]:
        if self.other is None:
            return {}
        return {f"second {name}": value.clone() for name, value in self.other.state_dict().items()}

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        head = list(model.head.parameters()) if self.extended and model is self.model else []
        # Models that share parameters name them once.
        others = [one for one in model.parameters() if all(one is not its for its in head)]
        groups = [{"params": others}, *([{"params": head}] if head else [])]
        name = self.case.optimizer
        if name == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        # An update on the host is torch's plain one.
        on_gpu = self.device.type == "cuda" and not any(plan.get("offload_states") for plan in self.case.plans())
        # With rates and counts on the device other code of torch's rounds differently.
        options: dict[str, Any] = {"lr": torch.tensor(0.01, device=self.device) if on_gpu else 0.01}
        options |= {"capturable": True} if on_gpu else {}
        if name == "adam":
            return torch.optim.Adam(groups, foreach=False, **options)
        return torch.optim.AdamW(groups, fused=name == "adamw fused" or None, **options)

    def do(self, event: Event) -> Observed:
        method: Callable[..., Observed | None] = getattr(self, event.kind.replace(" ", "_"))
        return method(**event.settings) or {}

    def batch(self, rank: int, *, number: int) -> Batch:
        """Return a rank's micro-batch in forward `number`."""
        generator = torch.Generator().manual_seed(self._seed(rank, number))
        rows, length = self.sizes[(number + rank) % len(self.sizes)]
        x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64).to(self.device, self.dtype)
        y = torch.randn(rows, length, 1, generator=generator, dtype=torch.float64).to(self.device, self.dtype)
        # Graphs belong to one value of each plain input.
        branches = any(part.uses == "sometimes" for part in self.case.parts)
        return {"x": x, "y": y, "key": (number + rank) % 2 if branches else 0}

    def seed_forward(self, rank: int, *, number: int) -> None:
        # torch.manual_seed also visits every kind of device that is not there, which takes longer than the forward.
        torch.default_generator.manual_seed(self._seed(rank, number))
        if self.device.type == "cuda":
            torch.cuda.manual_seed(self._seed(rank, number))

    def _seed(self, rank: int, number: int) -> int:
        return 1000 * self.case.seed + 10 * number + rank

    def freeze(self, *, part: int, how: str) -> None:
        freeze(self.model.parts[part], how)

    def set(self, *, part: int, factor: float) -> None:
        self._change("set", part, factor)

    def hook(self, *, part: int, how: str) -> None:
        self._change("hook", part, how)

    def _change(self, *change: Any) -> None:
        self.changes.append(change)
        _change(self.model, *change)

    def resize(self, *, how: str) -> None:
        self.sizes = SIZES[how]

    def failing(self, part: int, where: str) -> nn.Module:
        """Return the module that is to fail: the first inner one of a part, or the model's last."""
        return self.model.head if where == "head" else next(self.model.parts[part].children())

    def memory(self) -> dict[str, Any]:
        """Return what the forwards of parts have written in Python."""
        return {str(number): leaf for number, leaf in enumerate(tree_leaves(memory_of(self.model.parts)))}

    def lr(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    def replace_head(self) -> None:
        """Give the model another last layer."""
        self.extended = True
        torch.manual_seed(self.case.seed + 2)
        self.model.head = nn.Linear(WIDTH, 1).to(self.device, self.dtype)

    def add_head(self) -> None:
        self.optimizer.add_param_group({"params": list(self.model.head.parameters())})


def _change(model: Model, method: str, part: int, value: Any) -> None:
    module: Any = model.parts[part]
    if method == "hook":
        hook(module, value)
    elif hasattr(module, "set"):
        module.set(value)


def scaled(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose floating-point values are smaller; a parametrised one is left as it is."""
    return {
        name: value * FACTOR if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in state.items()
    }
