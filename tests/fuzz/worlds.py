"""The two worlds in which a case runs: one rank of a prepared job, and the oracle, one process of plain torch.

Both have the same methods, one for each kind of event. What a method returns is compared: {label: value} of this rank.
The oracle runs the ranks' micro-batches in rank order, sums their gradients and divides; buffers come from rank 0.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from compositions import Case, Event
from drawn_plans import as_plan
from parts import TIME, WIDTH, freeze, make
from torch import Tensor, nn

import shardwise

Observed = dict[str, Any]
MAX_NORM, CLIP_VALUE, FACTOR, DECAY = 0.5, 0.01, 0.9, 0.5


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01, foreach=False)
    return torch.optim.AdamW(parameters, lr=0.01, fused=name == "adamw fused" or None)


class World:
    """What both worlds share: the model, batches, and the count of forwards, which seeds each of them."""

    def __init__(self, case: Case, *, num_ranks: int) -> None:
        self.case = case
        self.num_ranks = num_ranks
        self.model = make(case.parts, seed=case.seed)
        self.dtype = torch.float64 if case.double else torch.float32
        self.model.to(self.dtype)
        self.optimizer = make_optimizer(case.optimizer, self.model)
        self.keys = dict(case.plan)
        self.num_forwards = 0
        self.averages: Any = None

    def do(self, event: Event) -> Observed:
        method: Callable[..., Observed | None] = getattr(self, event.kind.replace(" ", "_"))
        return method(**event.settings) or {}

    def loss(self, rank: int, *, number: int) -> Tensor:
        """Return the loss of a rank's micro-batch in forward `number`."""
        seed = 1000 * self.case.seed + 10 * number + rank
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, TIME, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        y = torch.randn(2, TIME, 1, generator=generator, dtype=torch.float64).to(self.dtype)
        torch.manual_seed(seed)
        found: Tensor = (self.model(x, number + rank) - y).square().mean()
        return found

    def freeze(self, *, part: int, how: str) -> None:
        freeze(self.model.parts[part], how)

    def lr(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()


class Rank(World):
    """One rank of a job."""

    def __init__(self, case: Case, *, num_ranks: int) -> None:
        super().__init__(case, num_ranks=num_ranks)
        self.rank = dist.get_rank()
        if case.double:
            self.keys |= {"precision": "native"}
        self._prepare(self.keys)

    def _prepare(self, keys: dict[str, Any]) -> None:
        plan = as_plan(keys, model=self.model)
        shardwise.prepare(self.model, self.optimizer, plan, watch_seconds=0.0, any_optimizer=True)

    def step(
        self, *, passes: int = 1, forwards: int = 1, backwards: int = 1, clip: str = "none", set_to_none: bool = True
    ) -> Observed:
        losses: list[float] = []
        norms: list[float] = []
        for number in range(passes):
            with shardwise.accumulate(self.model, enabled=number + 1 < passes):
                for _ in range(backwards):
                    found = [self._loss() for _ in range(forwards)]
                    sum(found).backward()
                    losses += [loss.item() for loss in found]
        if clip == "norm":
            norms.append(shardwise.clip_grad_norm_(self.model, MAX_NORM).item())
        elif clip == "value":
            shardwise.clip_grad_value_(self.model, CLIP_VALUE)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.averages is not None:
            self.averages.update()
        return {"losses": losses, "norms": norms}

    def _loss(self) -> Tensor:
        self.num_forwards += 1
        return self.loss(self.rank, number=self.num_forwards)

    def drop_a_forward(self, *, training: bool) -> Observed:
        return {"loss": self._in_mode(training, self._loss).item()}

    def _in_mode(self, training: bool, action: Callable[[], Tensor]) -> Tensor:
        self.model.train(training)
        try:
            return action()
        finally:
            self.model.train()

    @torch.no_grad()
    def evaluate(self, *, training: bool) -> Observed:
        # Ranks may call different parts.
        with shardwise.evaluating(self.model):
            return self.drop_a_forward(training=training)

    def replan(self, *, plan: dict[str, Any]) -> None:
        keys = {**plan, **({"precision": "native"} if self.case.double else {})}
        shardwise.replan(self.model, as_plan(keys, model=self.model))
        self.keys = keys

    def reload(self, *, plan: dict[str, Any]) -> None:
        if self.averages is not None:
            return
        state = deepcopy(shardwise.full_state_dict(self.model, self.optimizer))
        flags = [parameter.requires_grad for parameter in self.model.parameters()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        keys = {**plan, **({"precision": "native"} if self.case.double else {})}
        model = make(self.case.parts, seed=self.case.seed + 1).to(self.dtype)
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        optimizer = make_optimizer(self.case.optimizer, model)
        shardwise.prepare(model, optimizer, as_plan(keys, model=model), watch_seconds=0.0, any_optimizer=True)
        shardwise.load_full_state_dict(model, optimizer, state)
        self.model, self.optimizer, self.keys = model, optimizer, keys
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def read(self, *, how: str) -> Observed:
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value.clone() for name, value in self._values(how) if name in names}

    def _values(self, how: str) -> Iterator[tuple[str, Tensor]]:
        if how == "state_dict":
            yield from self.model.state_dict().items()
        elif how == "whole":
            with shardwise.whole(self.model):
                yield from [(name, p.detach().clone()) for name, p in self.model.named_parameters()]
        elif how == "weight_stream":
            yield from shardwise.weight_stream(self.model)
        else:
            yield from shardwise.full_state_dict(self.model)["model"].items()

    @torch.no_grad()
    def write(self, *, how: str) -> None:
        if how == "whole":
            with shardwise.whole(self.model, write=True):
                for parameter in self.model.parameters():
                    parameter.mul_(FACTOR)
        elif how == "edit":
            with shardwise.edit(self.model):
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(FACTOR)
        elif how == "in place":
            self.model.first.weight.mul_(FACTOR)
        else:
            module = self.model if how == "load_state_dict" else self.model.parts[0]
            module.load_state_dict(scaled(module.state_dict()))

    def grad_norms(self) -> Observed:
        """Return the norms of the gradients of a backward, without an update."""
        self._loss().backward()
        empty = {name for name, parameter in self.model.named_parameters() if not parameter.numel()}
        found = {name: norm for name, norm in shardwise.grad_norms(self.model).items() if name not in empty}
        self.optimizer.zero_grad()
        return {"norms": found}

    def start_average(self) -> None:
        self.averages = shardwise.EMA(self.model, decay=DECAY)

    def end(self) -> Observed:
        """Return all weights, averages, and on rank 0 the buffers."""
        state = self.model.state_dict()
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        found = {name: value.clone() for name, value in state.items() if name in names or self.rank == 0}
        if self.averages is not None:
            with self.averages.applied(), torch.no_grad():
                found["loss of the average"] = self._loss().item()
        return found


class OneProcess(World):
    """All ranks' micro-batches in one process of plain torch. `rank`: the one whose values are observed."""

    def __init__(self, case: Case, *, num_ranks: int, rank: int) -> None:
        super().__init__(case, num_ranks=num_ranks)
        self.rank = rank
        num_parameters = len(list(self.model.parameters()))
        # By rank: gradients that were not reduced yet, and buffers. The sum is of what was reduced.
        self.grads: list[list[Tensor | None]] = [[None] * num_parameters for _ in range(num_ranks)]
        self.sums: list[Tensor | None] = [None] * num_parameters
        self.buffers = [self._copied(self.model.buffers()) for _ in range(num_ranks)]
        self.awaits_backward = False
        self.zeroed: list[Tensor | None] = [None] * num_parameters

    def step(
        self, *, passes: int = 1, forwards: int = 1, backwards: int = 1, clip: str = "none", set_to_none: bool = True
    ) -> Observed:
        losses: list[float] = []
        norms: list[float] = []
        for number in range(passes):
            for _again in range(backwards):
                losses += self._each_rank(forwards)
                is_last = number + 1 == passes
                if is_last or self.keys.get("accumulate_reduced") or self.keys.get("dynamic"):
                    self._reduce()
        self._take()
        if clip == "norm":
            norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM).item())
        elif clip == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), CLIP_VALUE)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._keep_zeros()
        if self.averages is not None:
            for name, parameter in self.model.named_parameters():
                if name in self.averages:
                    self.averages[name].lerp_(parameter.detach(), 1 - DECAY)
        return {"losses": losses, "norms": norms}

    def _each_rank(self, forwards: int, *, backward: bool = True) -> list[float]:
        """Run the same forwards, and their backward, for each rank; return this rank's losses."""
        found: list[float] = []
        for rank in range(self.num_ranks):
            losses = []
            for index in range(forwards):
                self._begin_forward(rank, is_first=index == 0)
                losses.append(self.loss(rank, number=self.num_forwards + 1 + index))
                self.buffers[rank] = self._copied(self.model.buffers())
            if rank == self.rank:
                found = [loss.item() for loss in losses]
            if backward:
                sum(losses).backward()
                self._keep_grads(rank)
        self._set_buffers(0)
        self.num_forwards += forwards
        self.awaits_backward = (
            self.awaits_backward and not backward if torch.is_grad_enabled() else self.awaits_backward
        )
        return found

    def _begin_forward(self, rank: int, *, is_first: bool) -> None:
        """Give the model the rank's buffers, which are those of rank 0 in the first forward after a backward."""
        if torch.is_grad_enabled() and rank == 0 and is_first:
            if not self.awaits_backward:
                self.buffers = [self._copied(self.buffers[0]) for _ in self.buffers]
            self.awaits_backward = True
        self._set_buffers(rank)

    def _keep_grads(self, rank: int) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            held = self.grads[rank][index]
            if parameter.grad is not None:
                self.grads[rank][index] = parameter.grad if held is None else held + parameter.grad
            parameter.grad = None

    def _copied(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        return [buffer.clone() for buffer in buffers]

    def _set_buffers(self, rank: int) -> None:
        for buffer, value in zip(self.model.buffers(), self.buffers[rank], strict=True):
            # Unseen by autograd, which may have saved the buffer: these are several processes in one.
            buffer.data.copy_(value)

    def _reduce(self) -> None:
        """Add the average of the ranks' gradients to the sums."""
        for index in range(len(self.sums)):
            total: Tensor | None = None
            for row in self.grads:
                if row[index] is not None:
                    total = row[index] if total is None else total + row[index]
                row[index] = None
            if total is not None:
                total = total * (1 / self.num_ranks)
                self.sums[index] = total if self.sums[index] is None else self.sums[index] + total

    def _take(self) -> None:
        """Show the sums as gradients; where there is none, the zeros that `zero_grad(set_to_none=False)` left."""
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = self.zeroed[index] if self.sums[index] is None else self.sums[index]
            self.sums[index] = None

    def _keep_zeros(self) -> None:
        self.zeroed = [parameter.grad for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.grad = None

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._keep_zeros()

    def drop_a_forward(self, *, training: bool) -> Observed:
        self.model.train(training)
        (loss,) = self._each_rank(1, backward=False)
        self.model.train()
        return {"loss": loss}

    @torch.no_grad()
    def evaluate(self, *, training: bool) -> Observed:
        return self.drop_a_forward(training=training)

    def replan(self, *, plan: dict[str, Any]) -> None:
        self.keys = plan

    reload = replan

    def read(self, *, how: str) -> Observed:
        return {name: p.detach().clone() for name, p in self.model.named_parameters(remove_duplicate=how == "whole")}

    @torch.no_grad()
    def write(self, *, how: str) -> None:
        if how == "in place":
            self.model.first.weight.mul_(FACTOR)
            return
        if how in ("whole", "edit"):
            for parameter in self.model.parameters():
                parameter.mul_(FACTOR)
            return
        module = self.model if how == "load_state_dict" else self.model.parts[0]
        module.load_state_dict(scaled(module.state_dict()))
        self.buffers = [self._copied(self.model.buffers()) for _ in self.buffers]

    def grad_norms(self) -> Observed:
        self._each_rank(1)
        self._reduce()
        self._take()
        named = self.model.named_parameters()
        found = {name: p.grad.double().norm().item() for name, p in named if p.grad is not None and p.numel()}
        self.drop_gradients()
        return {"norms": found}

    def start_average(self) -> None:
        named = self.model.named_parameters()
        self.averages = {name: p.detach().clone() for name, p in named if p.requires_grad}

    def end(self) -> Observed:
        state = self.model.state_dict()
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        found = {name: value.clone() for name, value in state.items() if name in names or self.rank == 0}
        if self.averages is not None:
            named = dict(self.model.named_parameters())
            for name, value in self.averages.items():
                named[name].data.copy_(value)
            with torch.no_grad():
                (found["loss of the average"],) = self._each_rank(1, backward=False)
        return found


def scaled(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose floating-point values are smaller; a parametrised one is left as it is."""
    return {
        name: value * FACTOR if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in state.items()
    }
