"""The oracle: all ranks' micro-batches in one process of plain torch, in rank order.

Gradients are summed over ranks and divided; buffers come from rank 0.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from compositions import Case
from parts import judged, loss_of
from python_parts import Interrupted, interrupted, memory_of, remember
from torch import Tensor, nn
from worlds import CLIP_VALUE, DECAY, FACTOR, MAX_NORM, Observed, World, scaled


class OneProcess(World):
    """`rank`: the one whose values are observed."""

    def __init__(self, case: Case, *, num_ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(case, num_ranks=num_ranks, device=device)
        self.rank = rank
        self.buffers = [self._copied(self.model.buffers()) for _ in range(num_ranks)]
        self.memories = [memory_of(self.model.parts) for _ in range(num_ranks)]
        self.awaits_backward = False
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        num_parameters = len(list(self.model.parameters()))
        # By rank: gradients that were not reduced yet. The sum is of what was reduced.
        self.grads: list[list[Tensor | None]] = [[None] * num_parameters for _ in range(self.num_ranks)]
        self.sums: list[Tensor | None] = [None] * num_parameters
        self.zeroed: list[Tensor | None] = [None] * num_parameters

    def step(
        self,
        *,
        passes: int = 1,
        forwards: int = 1,
        backwards: int = 1,
        clip: str = "none",
        set_to_none: bool = True,
        by: str = "forward",
        retain: bool = False,
        autocast: bool = False,
    ) -> Observed:
        losses: list[float] = []
        is_one_call = by == "shardwise.step"
        # `shardwise.step` is seeded once; each rank continues its own random numbers in the next pass.
        states: list[Any] = [None] * self.num_ranks if is_one_call else []
        for number in range(passes):
            for _again in range(backwards):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                    divisor = passes if is_one_call else 1
                    losses += self._each_rank(forwards, states=states, divisor=divisor, retain=retain)
                is_last = number + 1 == passes
                if is_last or self.keys.get("accumulate_reduced") or self.keys.get("dynamic"):
                    self._reduce()
        norms = self._update(clip=clip, set_to_none=set_to_none)
        return {"losses": [sum_in(losses, self.dtype)] if is_one_call else losses, "norms": norms}

    def _update(self, *, clip: str = "none", set_to_none: bool = True) -> list[float]:
        norms: list[float] = []
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
        return norms

    def _each_rank(
        self,
        forwards: int,
        *,
        backward: bool = True,
        num_ranks: int | None = None,
        states: list[Any] | None = None,
        divisor: int = 1,
        retain: bool = False,
        judge: str = "",
    ) -> list[float]:
        """Run the same forwards, and their backward, for each rank; return this rank's losses."""
        found: list[float] = []
        for rank in range(self.num_ranks if num_ranks is None else num_ranks):
            losses = []
            for index in range(forwards):
                number = self.num_forwards + 1 + index
                self._begin_forward(rank, is_first=index == 0)
                if states and states[rank] is not None:
                    self._set_random(states[rank])
                else:
                    self.seed_forward(rank, number=number)
                batch = self.batch(rank, number=number)
                also = partial(judged, other=self.second(), batch=batch, how=judge) if judge else None
                try:
                    loss = loss_of(self.model, batch, also=also)
                except Interrupted:
                    loss = torch.zeros(())
                losses.append(loss / divisor if divisor > 1 else loss)
                self._keep_state(rank)
            if rank == self.rank:
                found = [loss.item() for loss in losses]
            for is_kept in [True, False] if retain else [False] * backward:
                sum(losses).backward(retain_graph=is_kept)
                self._keep_grads(rank)
                # A checkpoint computes again.
                self._keep_state(rank)
            if states:
                states[rank] = self._random()
        self._set_state(0)
        self.num_forwards += forwards
        if torch.is_grad_enabled():
            self.awaits_backward = self.awaits_backward and not backward
        return found

    def _random(self) -> Any:
        on_device = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set_random(self, states: Any) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1])

    def _begin_forward(self, rank: int, *, is_first: bool) -> None:
        """Give the model the rank's buffers, which are those of rank 0 in the first forward after a backward."""
        if torch.is_grad_enabled() and rank == 0 and is_first:
            if not self.awaits_backward:
                self._share_buffers()
            self.awaits_backward = True
        self._set_state(rank)

    def _share_buffers(self) -> None:
        self.buffers = [self._copied(self.buffers[0]) for _ in self.buffers]

    def _keep_grads(self, rank: int) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            held = self.grads[rank][index]
            if parameter.grad is not None:
                self.grads[rank][index] = parameter.grad if held is None else held + parameter.grad
            parameter.grad = None

    def _copied(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        return [buffer.clone() for buffer in buffers]

    def _keep_state(self, rank: int) -> None:
        self.buffers[rank] = self._copied(self.model.buffers())
        self.memories[rank] = memory_of(self.model.parts)

    def _set_state(self, rank: int) -> None:
        remember(self.model.parts, self.memories[rank])
        for buffer, value in zip(self.model.buffers(), self.buffers[rank], strict=True):
            # Unseen by autograd, which may have saved the buffer: these are several processes in one.
            buffer.data.copy_(value)

    def _reduce(self, *, num_counting: int | None = None) -> None:
        """Add the average of the ranks' gradients to the sums."""
        for index in range(len(self.sums)):
            total: Tensor | None = None
            for row in self.grads:
                if row[index] is not None:
                    total = row[index] if total is None else total + row[index]
                row[index] = None
            if total is not None:
                total = total * (1 / (num_counting or self.num_ranks))
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

    def evaluate(self, *, training: bool, under: str = "no_grad") -> Observed:
        with getattr(torch, under)():
            return self.drop_a_forward(training=training)

    def fail(self, *, part: int, where: str) -> None:
        with interrupted(self.failing(part, where)):
            self._each_rank(1, backward=False)

    def together(self, *, how: str) -> Observed:
        other = self.second()
        if how == "turns":
            losses = [self._second_loss(rank) for rank in range(self.num_ranks)][self.rank : self.rank + 1]
            self.num_forwards += 1
        else:
            losses = self._each_rank(1, judge=how)
            self._reduce()
            self._update()
        if how != "teacher":
            for parameter in other.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1 / self.num_ranks
            self.other_optimizer.step()
            self.other_optimizer.zero_grad()
        return {"losses": losses}

    def _second_loss(self, rank: int) -> float:
        number = self.num_forwards + 1
        self.seed_forward(rank, number=number)
        loss = loss_of(self.second(), self.batch(rank, number=number))
        loss.backward()
        return loss.item()

    def join(self) -> Observed:
        losses = self._each_rank(1)
        self._reduce()
        self._update()
        losses += self._each_rank(1, num_ranks=1)
        self._repeat_last_batch()
        self._reduce(num_counting=1)
        self._update()
        self._share_buffers()
        return {"losses": losses}

    def _repeat_last_batch(self) -> None:
        """Have ranks that have run out compute their batch again: it does not count, and changes their state in Python."""
        number = self.num_forwards - 1
        for rank in range(1, self.num_ranks):
            self._set_state(rank)
            self.seed_forward(rank, number=number)
            loss_of(self.model, self.batch(rank, number=number)).backward()
            self._keep_state(rank)
            for parameter in self.model.parameters():
                parameter.grad = None
        self._set_state(0)

    def mean_count(self) -> Observed:
        return {"mean": (self.num_ranks + 1) / 2}

    def extend(self) -> None:
        if self.extended:
            return
        before = list(self.model.head.parameters())
        self.replace_head()
        for group in self.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if all(one is not its for its in before)]
        for parameter in before:
            self.optimizer.state.pop(parameter, None)
        self.add_head()
        self._forget_gradients()

    def replan(self, *, plan: dict[str, Any]) -> None:
        self.keys = plan

    def reload(self, *, plan: dict[str, Any], how: str) -> None:
        if how == "full state" and self.averages is not None:
            return
        self.keys = plan
        # Of a new model and a new optimizer there are no gradients, and no forward has run.
        self._forget_gradients()
        self.awaits_backward = False
        if how != "full state":
            self._share_buffers()

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
        # Each rank loads its own buffers, and these are rank 0's.
        loaded = {id(buffer) for buffer in module.buffers()}
        are_loaded = [id(buffer) in loaded and buffer.is_floating_point() for buffer in self.model.buffers()]
        self.buffers = [
            [value * FACTOR if is_loaded else value for value, is_loaded in zip(row, are_loaded, strict=True)]
            for row in self.buffers
        ]

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
        remember(self.model.parts, self.memories[self.rank])
        found |= self.weights_of_second()
        found["memory"] = self.memory()
        if self.averages is not None:
            named = dict(self.model.named_parameters())
            for name, value in self.averages.items():
                named[name].data.copy_(value)
            with torch.no_grad():
                (found["loss of the average"],) = self._each_rank(1, backward=False)
        return found


def sum_in(values: list[float], dtype: torch.dtype) -> float:
    """Return the sum, in order, as tensors of that dtype are added."""
    total = torch.tensor(values[0], dtype=dtype)
    for value in values[1:]:
        total = total + torch.tensor(value, dtype=dtype)
    return total.item()
