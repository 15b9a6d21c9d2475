"""A published measurement as a row, and which rows constants may be fitted to."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from shardwise.plan import Plan
from shardwise.program.spec.losses import USUAL

MODELS = Path(__file__).parent / "published_models.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published measurement: what was run, and `per_s` of it (tokens of a GPU if `seq` is set, else samples of all).

    seq            tokens of a sample, if the catalogue's spec is taken at that length with more positions
    length         tokens of a sample, if the catalogue's spec is traced at that length
    block_steps    how many steps were measured in one go; None: so many that it does not matter
    software       the generation of kernels that its date stands for (hardware/software.toml)
    matmul         what torch.set_float32_matmul_precision was set to
    is_compiled    by torch.compile
    system         as which it is predicted (planner/systems.py), where it is not ours or torch's engine as we use it
    loss           of a language model that is traced with the usual one (program/spec/losses.py)
    per_s          None where nothing is known of its time
    ran            False: it ran out of memory
    peak_bytes     of memory, allocated, where it is known
    split_as       (model, length, recompute) by which the split goes, where the row was read otherwise when it was made
    """

    table: str
    model: str
    cluster: str
    plan: Plan
    optimizer: str
    per_s: float | None
    seq: int | None = None
    length: int | None = None
    block_steps: int | None = None
    software: str = "current"
    matmul: str = "highest"
    is_compiled: bool = False
    system: str = ""
    loss: str = USUAL
    ran: bool = True
    peak_bytes: float | None = None
    split_as: tuple[str, int | None, str] | None = None

    def __str__(self) -> str:
        seq = f" x {self.seq or self.length}" if self.seq or self.length else ""
        plan = self.plan
        how = " compiled" if self.is_compiled else ""
        return (
            f"{self.model.rpartition(':')[2]:12} {self.cluster:26} {self.table:20} {plan.strategy} {plan.precision} "
            f"{plan.micro_batch}{seq} accumulate {plan.accumulate} recompute {plan.recompute}{how}"
        )

    @property
    def is_held_out(self) -> bool:
        """Whether no constant may be fitted to it: a half of all trainings, by the hash of what was run.

        Repeated measurements of one training stay together. What a reader assumes (links, software) does not count, so
        that no assumption moves a row from one half to the other; nor does a better reading.
        """
        plan = self.plan
        devices = self.cluster.partition("@")[0]
        as_read = (self.model.rpartition(":")[2], self.seq or self.length, plan.recompute)
        model, length, recompute = self.split_as or as_read
        # The last value tells nothing apart, and keeps the halves as they were.
        how = (plan.strategy, plan.precision, plan.micro_batch, plan.accumulate, recompute, False)
        key = " ".join(map(str, (self.table, model, devices, length, *how, self.is_compiled, self.matmul)))
        return sha256(key.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row of a table that the planner cannot express, or that says too little."""

    table: str
    what: str
    reason: str


def csv_rows(path: Path, *, source: str = "") -> Iterator[dict[str, str]]:
    """Yield the rows of a table; `source`: only those whose source begins with it."""
    with path.open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if not source or row["source"].startswith(source))


def own_model(function: str, *, file: Path = MODELS) -> str:
    """Return the reference of a model of published_models.py, or of another file."""
    return f"python:{file}:{function}"


def cluster_text(kind: str, *, num_gpus: int, fabric: str, per_node: int = 8) -> str:
    if num_gpus <= per_node:
        return f"{num_gpus}x{kind}"
    return f"{num_gpus // per_node}x{per_node}x{kind}@{fabric}"
