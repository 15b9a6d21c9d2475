"""The same training script under several engines: one process, ours by strategy, torch's DDP and `fully_shard`.

A scenario is written once, against `Runner`. One process takes the batches of both ranks in turn, adds up their
gradients and halves them, which is what two ranks do; so equal means equal bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan
from shardwise.program.units import unit_modules

NUM_RANKS = 2
Weights = dict[str, Tensor]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Runner:
    """One process. The other engines override what they do differently."""

    name = "one process"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # In addition to those of a scenario.
        self.more_steps = 0

    def steps(self, num_steps: int) -> range:
        return range(num_steps + self.more_steps)

    def prepare(self, model: nn.Module, *optimizers: Optimizer, units: str = "auto", **options: Any) -> nn.Module:
        """Return the model that is called from now on."""
        return model

    def prepare_together(self, models: nn.ModuleDict, optimizer: Optimizer) -> Mapping[str, nn.Module]:
        """Prepare models that share parameters; return what is called from now on, by name."""
        self.prepare(models, optimizer)
        return dict(models.items())

    def step(
        self,
        optimizer: Optimizer,
        loss: Callable[[int], Tensor],
        *,
        passes: int = 1,
        keeps: bool = False,
        **clip: float,
    ) -> None:
        """Update from `loss(share)` of each share of the data; a rank has one share per pass.

        keeps   add to the gradients that are there
        """
        parameters = parameters_of(optimizer)
        sums: list[Tensor | None] = [None] * len(parameters)
        before_all = [parameter.grad if keeps else None for parameter in parameters]
        for share in range(NUM_RANKS):
            optimizer.zero_grad()
            for parameter, grad in zip(parameters, before_all, strict=True):
                parameter.grad = None if grad is None else grad.clone()
            for number in range(passes):
                (loss(share + NUM_RANKS * number) / passes).backward()
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    grad, before = parameter.grad, sums[index]
                    sums[index] = grad.clone() if before is None else before + grad
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None if total is None else total * (1 / NUM_RANKS)
        self._update(optimizer, **clip)

    def _update(self, optimizer: Optimizer, **clip: float) -> None:
        self.clip(optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()

    def clip(self, optimizer: Optimizer, *, clip: float | None = None, clip_value: float | None = None) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
        if clip_value is not None:
            nn.utils.clip_grad_value_(parameters_of(optimizer), clip_value)

    def weights(self, model: nn.Module) -> Weights:
        return {name: _unsharded(value).detach().clone() for name, value in model.state_dict().items()}

    @property
    def owned(self) -> bool:
        """Whether some parameters have their optimizer state whole on one rank."""
        return False

    @property
    def num_replayed(self) -> int:
        """How many calls of units were replays of a graph."""
        return 0

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool = False) -> Iterator[None]:
        with torch.no_grad():
            yield

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def average(self, model: nn.Module, decay: float) -> Any:
        return Average(model, decay)

    def extend(self, model: nn.Module) -> None:
        pass

    def forward_method(self, model: nn.Module, name: str) -> None:
        pass

    def evaluating(self, model: nn.Module) -> Any:
        return nullcontext()

    def stream(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in model.named_parameters())


def _unsharded(value: Tensor) -> Tensor:
    """Return the full tensor where torch has sharded it. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Average:
    """An average of parameters, as each process would keep it of what it has."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._values = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for value, parameter in zip(self._values, self._model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 1 - self._decay)

    def weights(self, runner: Runner) -> Weights:
        names = [name for name, _ in self._model.named_parameters()]
        return dict(zip(names, map(_unsharded, self._values), strict=True))


class OnRanks(Runner):
    """What the engines of several ranks have in common: a rank takes its own share."""

    def step(
        self,
        optimizer: Optimizer,
        loss: Callable[[int], Tensor],
        *,
        passes: int = 1,
        keeps: bool = False,
        **clip: float,
    ) -> None:
        if not keeps:
            optimizer.zero_grad()
        for number in range(passes):
            with nullcontext() if number == passes - 1 else self.accumulating():
                (loss(self.rank + NUM_RANKS * number) / passes).backward()
        self._update(optimizer, **clip)

    def accumulating(self) -> Any:
        return nullcontext()


class Ours(OnRanks):
    def __init__(self, rank: int, strategy: str) -> None:
        super().__init__(rank)
        self.name = strategy
        # The model that was prepared last, and for each optimizer its own.
        self._last: Any = None
        self._models: dict[int, nn.Module] = {}

    def prepare(self, model: nn.Module, *optimizers: Optimizer, units: str = "auto", **options: Any) -> nn.Module:
        given: Any = optimizers[0] if len(optimizers) == 1 else list(optimizers) or None
        self._last, _ = shardwise.prepare(model, given, Plan(strategy=self.name, units=units, **options))
        self._models |= {id(optimizer): model for optimizer in optimizers}
        return self._last

    @property
    def owned(self) -> bool:
        return bool(engine_of(self._last).core.followed.plan.owned)

    @property
    def num_replayed(self) -> int:
        graphs = engine_of(self._last).graphs
        return 0 if graphs is None else graphs.num_replayed

    def accumulating(self) -> Any:
        return shardwise.accumulate(self._last)

    def clip(self, optimizer: Optimizer, *, clip: float | None = None, clip_value: float | None = None) -> None:
        model = self._models.get(id(optimizer), self._last)
        if clip is not None:
            shardwise.clip_grad_norm_(model, clip)
        if clip_value is not None:
            shardwise.clip_grad_value_(model, clip_value)

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool = False) -> Iterator[None]:
        with shardwise.whole(model, write=write), torch.no_grad():
            yield

    def scaler(self) -> torch.amp.GradScaler:
        return shardwise.GradScaler("cpu", init_scale=2.0**10)

    def average(self, model: nn.Module, decay: float) -> Any:
        return OurAverage(model, decay)

    def extend(self, model: nn.Module) -> None:
        shardwise.extend(model)

    def forward_method(self, model: nn.Module, name: str) -> None:
        shardwise.forward_method(model, name)

    def evaluating(self, model: nn.Module) -> Any:
        return shardwise.evaluating(model)

    def stream(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return shardwise.weight_stream(model)


class OurAverage:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._average = model, shardwise.EMA(model, decay=decay)
        self.update = self._average.update

    def weights(self, runner: Runner) -> Weights:
        with self._average.applied():
            return runner.weights(self._model)


class TorchDDP(OnRanks):
    name = "torch DDP"

    def prepare(self, model: nn.Module, *optimizers: Optimizer, units: str = "auto", **options: Any) -> nn.Module:
        self._wrapped = nn.parallel.DistributedDataParallel(model)
        return self._wrapped

    def prepare_together(self, models: nn.ModuleDict, optimizer: Optimizer) -> Mapping[str, nn.Module]:
        """Wrap each: one wrapper around both could not be called for one of them."""
        return {name: nn.parallel.DistributedDataParallel(model) for name, model in models.items()}

    def accumulating(self) -> Any:
        return self._wrapped.no_sync()


class FullyShard(OnRanks):
    """The same units as ours; the optimizer is given the sharded parameters, as PyTorch's guide does."""

    name = "fully_shard"

    def prepare(self, model: nn.Module, *optimizers: Optimizer, units: str = "auto", **options: Any) -> nn.Module:
        names = {id(p): name for name, p in model.named_parameters()}
        held = [[[names[id(p)] for p in group["params"]] for group in one.param_groups] for one in optimizers]
        # Inner units first, and the root last, as torch asks for.
        for module in reversed(unit_modules(model, policy=units).values()):
            fully_shard(module)
        now = dict(model.named_parameters())
        for one, groups in zip(optimizers, held, strict=True):
            for group, own in zip(one.param_groups, groups, strict=True):
                group["params"] = [now[name] for name in own]
        return model

    def stream(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return self.weights(model).items()


PEERS = {"torch DDP": TorchDDP, "fully_shard": FullyShard}


def make_runner(engine: str, rank: int) -> Runner:
    if engine == Runner.name:
        return Runner(rank)
    return PEERS[engine](rank) if engine in PEERS else Ours(rank, engine)
