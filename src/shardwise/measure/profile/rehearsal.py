"""A rehearsal: one rank of a job of any size runs on this device, with the others absent. No torch here.

Memory and compute time are those of a real rank; communication takes no time. Each rehearsal runs in a separate process
(rehearsal_process.py), which leaves no memory and no state behind.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.data_file import read_json
from shardwise.base.vocabulary.process_output import own_lines
from shardwise.measure.profile.memory_ledger import MemoryLedger
from shardwise.plan import Plan


class RehearsalFailed(ShardwiseError):  # noqa: N818
    """The process of a rehearsal ended without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Rank 0 of `num_ranks`, with `batch` samples per pass; a job of one rank is a real one.

    steps      how many steps are timed
    history    a file for the allocator's history, on a GPU
    """

    model: str
    plan: Plan
    num_ranks: int = 1
    batch: int = 1
    seq: int | None = None
    image: int | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    steps: int = 3
    history: str | None = None

    def to_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"plan": self.plan.to_dict()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Rehearsal":
        return cls(**{**data, "plan": Plan.from_dict(data["plan"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one step.

    counted_bytes    its peak by torch's counter, which rounds up; reserved_bytes: the most that the caching allocator
                     held; both None on a CPU
    step_seconds     of each timed step: forward, backward and update, without communication
    """

    ledger: MemoryLedger
    counted_bytes: int | None
    reserved_bytes: int | None
    step_seconds: tuple[float, ...]
    device_name: str

    @property
    def allocated_bytes(self) -> int:
        return self.ledger.peak.total_bytes if self.counted_bytes is None else self.counted_bytes

    @property
    def whole_ledger(self) -> MemoryLedger:
        """The ledger raised to `allocated_bytes`, so that its categories add up."""
        return self.ledger.adding_up_to(self.allocated_bytes)

    def to_data(self) -> dict[str, Any]:
        return asdict(self) | {"ledger": self.ledger.to_data()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measured":
        ledger, seconds = MemoryLedger.from_data(data["ledger"]), tuple(data["step_seconds"])
        return cls(**{**data, "ledger": ledger, "step_seconds": seconds})


def rehearse_apart(rehearsal: Rehearsal) -> Measured:
    """Run a rehearsal in a fresh process; its output goes to our standard error."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        asked, found = Path(folder, "asked.json"), Path(folder, "found.json")
        asked.write_text(json.dumps(rehearsal.to_data()))
        # -P: like our own command, without the working folder on the module path.
        command = [sys.executable, "-P", "-m", "shardwise.measure.profile.rehearsal_process", str(asked), str(found)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if ended.returncode != 0 or not found.exists():
            raise _failure(rehearsal, code=ended.returncode, output=ended.stdout)
        sys.stderr.writelines(f"{line}\n" for line in own_lines(ended.stdout))
        return Measured.from_data(read_json(found, most_bytes=2**30, finite=False))


def _failure(rehearsal: Rehearsal, *, code: int, output: str) -> RehearsalFailed:
    """Describe the failure in one line; the full output is a note, shown with --debug."""
    lines = [line.strip() for line in own_lines(output) if line.strip()]
    why = lines[-1] if lines else f"exit code {code}"
    if code < 0:
        why = f"killed by signal {-code}" + (", perhaps for lack of memory" if code == -9 else "")
    error = RehearsalFailed(f"{rehearsal.model} under {rehearsal.plan.strategy}: {why[:400]}")
    error.add_note(output)
    return error
