"""A case on one rank of a prepared job; and the same under ddp, the oracle of cases in a narrow precision."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compositions import Case
from drawn_plans import FP8_UNITS, NARROW, as_plan
from late import LateCollectives
from parts import Batch, Model, judged, loss_of
from python_parts import Interrupted, interrupted, memory_of, remember
from torch import Tensor, nn
from worlds import CLIP_VALUE, DECAY, FACTOR, MAX_NORM, Observed, World, scaled

import shardwise
from shardwise.checkpoint import Checkpoints
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.prepare import _collectives
from shardwise.engines import require_engine


class Rank(World):
    """One rank of a job."""

    def __init__(self, case: Case, *, num_ranks: int, device: torch.device) -> None:
        super().__init__(case, num_ranks=num_ranks, device=device)
        self.rank = dist.get_rank()
        self.keys = self._planned(self.keys)
        self._prepare(self.model, self.optimizer, self.keys)
        # Small, so that nothing overflows: whether a step was skipped would depend on it.
        self.scaler = shardwise.GradScaler(device.type, init_scale=8.0, enabled=self.keys.get("precision") == "fp16")
        self.steps: dict[Any, Callable[..., Tensor]] = {}

    def replayed(self) -> int:
        """Return how many calls of units under the last plan were replays of graphs."""
        return require_engine(self.model).replayed_calls()[1]

    def _planned(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {**keys, "precision": "native"} if self.case.double else dict(keys)

    def _prepare(self, model: Model, optimizer: torch.optim.Optimizer, keys: dict[str, Any]) -> None:
        plan = as_plan(keys, model=model)
        late = LateCollectives(_collectives(plan), seed=self.case.seed, max_delay_seconds=0) if self.case.late else None
        shardwise.prepare(model, optimizer, plan, watch_seconds=0.0, any_optimizer=True, collectives=late)

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
        if by == "shardwise.step":
            found = self._step_by_call(passes, clip=clip)
        else:
            cast = torch.autocast(self.device.type, torch.bfloat16, enabled=autocast)
            found = self._step_by_loop(passes, forwards, backwards, clip=clip, by=by, retain=retain, cast=cast)
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.averages is not None:
            self.averages.update()
        return found

    def _step_by_loop(
        self, passes: int, forwards: int, backwards: int, *, clip: str, by: str, retain: bool, cast: torch.autocast
    ) -> Observed:
        losses: list[float] = []
        norms: list[float] = []
        for number in range(passes):
            with shardwise.accumulate(self.model, enabled=number + 1 < passes):
                for _ in range(backwards):
                    with cast:
                        found = [self._loss(by=by) for _ in range(forwards)]
                    total = self.scaler.scale(sum(found))
                    if retain:
                        total.backward(retain_graph=True)
                    total.backward()
                    losses += [loss.item() for loss in found]
        if clip != "none":
            self.scaler.unscale_(self.optimizer)
        if clip == "norm":
            norms.append(shardwise.clip_grad_norm_(self.model, MAX_NORM).item())
        elif clip == "value":
            shardwise.clip_grad_value_(self.model, CLIP_VALUE)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"losses": losses, "norms": norms}

    def _step_by_call(self, passes: int, *, clip: str) -> Observed:
        max_norm = MAX_NORM if clip == "norm" else None
        key = (id(self.model), max_norm)
        if key not in self.steps:
            self.steps[key] = shardwise.step(self.model, self.optimizer, loss_of, max_norm=max_norm, scaler=self.scaler)
        first = self.num_forwards + 1
        self.num_forwards += passes
        self.seed_forward(self.rank, number=first)
        loss = self.steps[key](*(self.batch(self.rank, number=first + index) for index in range(passes)))
        norm = self.steps[key].grad_norm
        return {"losses": [loss.item()], "norms": [] if norm is None else [norm.item()]}

    def _loss(self, *, by: str = "forward") -> Tensor:
        self.num_forwards += 1
        return self._loss_of(self.batch(self.rank, number=self.num_forwards), number=self.num_forwards, by=by)

    def _loss_of(self, batch: Batch, *, number: int, by: str = "forward") -> Tensor:
        self.seed_forward(self.rank, number=number)
        if by == "method":
            shardwise.forward_method(self.model, "loss_of")
            return self.model.loss_of(batch)
        return loss_of(self.model, batch)

    def drop_a_forward(self, *, training: bool) -> Observed:
        return {"loss": self._in_mode(training, self._loss).item()}

    def _in_mode(self, training: bool, action: Callable[[], Tensor]) -> Tensor:
        self.model.train(training)
        try:
            return action()
        finally:
            self.model.train()

    def evaluate(self, *, training: bool, under: str = "no_grad") -> Observed:
        # Ranks may call different parts.
        with shardwise.evaluating(self.model), getattr(torch, under)():
            return self.drop_a_forward(training=training)

    def fail(self, *, part: int, where: str) -> None:
        with suppress(Interrupted), interrupted(self.failing(part, where)):
            self._loss()

    def prepare_second(self, other: Model) -> None:
        self._prepare(other, self.other_optimizer, self._planned(dict(self.case.other_plan)))

    def together(self, *, how: str) -> Observed:
        other, optimizers = self.second(), [self.optimizer]
        self.num_forwards += 1
        batch = self.batch(self.rank, number=self.num_forwards)
        self.seed_forward(self.rank, number=self.num_forwards)
        if how == "turns":
            loss, optimizers = loss_of(other, batch), [self.other_optimizer]
        else:
            loss = loss_of(self.model, batch, also=partial(judged, other=other, batch=batch, how=how))
            optimizers += [self.other_optimizer] if how == "critic" else []
        self.scaler.scale(loss).backward()
        for optimizer in optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        if self.averages is not None and how != "turns":
            self.averages.update()
        return {"losses": [loss.item()]}

    def join(self) -> Observed:
        """Rank 0 has one batch more than the others."""
        first = self.num_forwards + 1
        numbers = [first, first + 1] if self.rank == 0 else [first]
        self.num_forwards += 2
        losses = []
        for number in shardwise.join(self.model, numbers):
            loss = self._loss_of(self.batch(self.rank, number=number), number=number)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.averages is not None:
                self.averages.update()
            losses.append(loss.item())
        return {"losses": losses[: len(numbers)]}

    def mean_count(self) -> Observed:
        return {"mean": shardwise.mean_count(self.model, self.rank + 1)}

    def extend(self) -> None:
        if self.extended:
            return
        before = self.model.head
        self.replace_head()
        try:
            shardwise.extend(self.model)
        except shardwise.ShardwiseError:
            self.extended, self.model.head = False, before
            raise
        self.add_head()
        self.steps = {}

    def replan(self, *, plan: dict[str, Any]) -> None:
        keys = self._planned(plan)
        shardwise.replan(self.model, as_plan(keys, model=self.model))
        self.keys = keys

    def reload(self, *, plan: dict[str, Any], how: str) -> None:
        keys = self._planned(plan)
        if how == "fewer ranks" and self.num_ranks == 1:
            how = "checkpoint"
        if how == "full state":
            if self.averages is None:
                self._reload_state(keys)
            return
        with self._folder() as folder:
            self._save(folder / "first")
            if how == "fewer ranks":
                self._on_fewer_ranks(folder, keys)
            self._load(folder / ("second" if how == "fewer ranks" else "first"), keys)
        self.keys, self.steps = keys, {}

    def _on_fewer_ranks(self, folder: Path, keys: dict[str, Any]) -> None:
        """Load the first checkpoint on fewer ranks, and save the second one there."""
        failure: Exception | None = None
        with smaller_job(self.num_ranks - 1) as is_member:
            try:
                if is_member:
                    self._load(
                        folder / "first",
                        {name: value for name, value in keys.items() if name not in ("mesh", "across")},
                    )
                    self._save(folder / "second")
            except Exception as error:
                failure = error
        raised = [error for error in exchange(failure) if error is not None]
        if raised:
            raise failure or raised[0]

    def _reload_state(self, keys: dict[str, Any]) -> None:
        state = deepcopy(shardwise.full_state_dict(self.model, self.optimizer))
        rates = [group["lr"] for group in self.optimizer.param_groups]
        model, optimizer = self._made_again(keys)
        shardwise.load_full_state_dict(model, optimizer, state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.model, self.optimizer, self.keys, self.steps = model, optimizer, keys, {}

    def _made_again(self, keys: dict[str, Any]) -> tuple[Model, torch.optim.Optimizer]:
        """Return another model and optimizer that are prepared, and still have to be filled."""
        flags = [parameter.requires_grad for parameter in self.model.parameters()]
        memory = memory_of(self.model.parts)
        model = self.make_model(self.case.seed + 1)
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        remember(model.parts, memory)
        optimizer = self.make_optimizer(model)
        self._prepare(model, optimizer, keys)
        return model, optimizer

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Yield a folder that all ranks see."""
        path = Path(exchange(tempfile.mkdtemp() if self.rank == 0 else "")[0])
        try:
            yield path
        finally:
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(path)

    def _save(self, folder: Path) -> None:
        checkpoints = Checkpoints(folder)
        checkpoints.save(self.model, self.optimizer, step=1, ema=self.averages)
        checkpoints.close()

    def _load(self, folder: Path, keys: dict[str, Any]) -> None:
        model, optimizer = self._made_again(keys)
        averages = shardwise.EMA(model, decay=DECAY) if self.averages is not None else None
        checkpoints = Checkpoints(folder)
        checkpoints.load(checkpoints.latest(), model, optimizer, ema=averages)
        checkpoints.close()
        self.model, self.optimizer, self.averages = model, optimizer, averages

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
            module: nn.Module = self.model if how == "load_state_dict" else self.model.parts[0]
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
        found |= self.weights_of_second()
        found["memory"] = self.memory()
        if self.averages is not None:
            with self.averages.applied(), torch.no_grad():
                found["loss of the average"] = self._loss().item()
        return found


class Reference(Rank):
    """The same under ddp, with those keys that decide what is computed, and when gradients are reduced."""

    _KEPT = (*NARROW, "accumulate_reduced", "dynamic")

    def _planned(self, keys: dict[str, Any]) -> dict[str, Any]:
        units = {"units": FP8_UNITS} if keys.get("precision") == "fp8" else {}
        kept = {name: keys[name] for name in self._KEPT if name in keys}
        return {"strategy": "ddp", "capture": "off", **units, **kept}


@contextmanager
def smaller_job(num_ranks: int) -> Iterator[bool]:
    """Make the first ranks a job; yield whether this rank belongs to it. The others wait."""
    world = dist.distributed_c10d._world
    everyone, count = world.default_pg, world.group_count
    group = dist.new_group(list(range(num_ranks)))
    is_member = dist.get_rank() < num_ranks
    if is_member:
        world.default_pg = group
    try:
        yield is_member
    finally:
        world.default_pg = everyone
        # Groups are named by their number, which has to be the same on all ranks.
        world.group_count = count + 1000
        dist.barrier()
