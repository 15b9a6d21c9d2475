"""A training that is measured: what it is, and how it is set up. Several benchmarks measure it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from hugging_face_models import MODELS, task_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.engines import prepare
from shardwise.models.catalogue import shape_of
from shardwise.models.tasks import Task, load_task
from shardwise.plan import Plan
from shardwise.program.spec import ROOT
from shardwise.program.units import unit_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training. `num_ranks` = 1 is a real job of one rank, more of them a rehearsal of rank 0."""

    model: str
    batch: int
    seq: int | None = None
    image: int | None = None
    engine: str = "shardwise"
    strategy: str = "fsdp"
    num_ranks: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    capture: str = "off"
    compile: str = "none"
    optimizer: str = "adamw-fused"

    def __str__(self) -> str:
        size = f"{self.batch} × {self.seq or self.image}"
        how = " ".join(word for word in ("graphs" * self.has_graphs, "recompute" * (self.recompute == "full")) if word)
        return (
            f"{self.model:13} {self.engine:9} {self.strategy:13} {self.num_ranks:4} ranks {self.precision} "
            f"{how:9} {size:9} {self.optimizer:13}"
        )

    @property
    def has_graphs(self) -> bool:
        return self.capture != "off"

    @property
    def plan(self) -> Plan:
        # Torch's engine recomputes by marks on the units.
        recompute = self.recompute if self.engine == "shardwise" else "none"
        return Plan(
            strategy=self.strategy,
            precision=self.precision,
            recompute=recompute,
            engine=self.engine,
            capture=self.capture,
            compile=self.compile,
        )

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A case that is set up. `loss(*batch)` is computed by the prepared model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]

    def step(self) -> Tensor:
        """Train one step, and return the loss."""
        loss = self.loss(*self.batch)
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def set_up(case: Case, *, device: str, made_on: str = "meta", collectives: Any = None) -> Training:
    """Make the model, on the meta device by default, and give it to its engine."""
    torch.manual_seed(0)
    is_catalogue = case.model not in MODELS
    task = (
        load_task(case.model, seq=case.seq, image=case.image, device=made_on)
        if is_catalogue
        else task_of(case.model, device=made_on, masked=True)
    )
    task.model.train()
    units = unit_modules(task.model)
    optimizer = make_optimizer(case.optimizer, task.model)
    model, optimizer = prepare(task.model, optimizer, case.plan, device=device, collectives=collectives)
    if case.recompute == "full" and case.engine == "torch":
        recompute_units(units)
    batch, names = drawn_batch(task, case=case, device=device), ()
    if not is_catalogue:
        names, batch = tuple(batch), tuple(batch.values())
    return Training(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda *parts: task.loss(model, dict(zip(names, parts, strict=True)) if names else parts),
    )


def recompute_units(units: Mapping[str, nn.Module]) -> None:
    """Do for torch's engine what `Plan(recompute="full")` does for ours: run each unit's forward again in backward.

    For a prepared model, whose units were found before: a head with another forward is no plain Linear to
    `unit_modules`, so that the model would be prepared with the head in the root.
    """
    for name, module in units.items():
        if name != ROOT:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    fused = name == "adamw-fused"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None, foreach=not fused or None)


def drawn_batch(task: Task, *, case: Case, device: str) -> Any:
    """Return a batch of random values; tokens and labels are those that there are."""
    batch = task.make_batch(case.batch)
    if case.model in MODELS:
        vocabulary = MODELS[case.model].values["vocab_size"]
        ids = torch.randint(5, vocabulary, batch["input_ids"].shape, device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shape: Any = shape_of(case.model)
    num_labels = shape.vocab_size if case.seq else shape.num_classes

    def real(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.randint(num_labels, tensor.shape, dtype=tensor.dtype, device=device)

    return tuple(real(tensor) for tensor in batch)
