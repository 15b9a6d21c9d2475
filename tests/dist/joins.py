"""A small rank for the launcher's tests: `joins.py FOLDER [DIES]` joins, adds up the ranks, and writes what it found.

With DIES, that rank kills itself in the first start, in the middle of a collective of the others.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from processes import listening

from shardwise.comm.job.join import joined
from shardwise.training.launch.failure import report


def main() -> None:
    folder, dies = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    with joined(torch.device("cpu"), limit_seconds=60, on_error=report) as place:
        total = torch.tensor([place.rank + 1])
        dist.all_reduce(total)
        if place.rank == dies and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # A group of its own opens more connections.
        group = dist.new_group(backend="gloo")
        dist.barrier(group)
        heard = listening({os.getpid(), os.getppid()})
        dist.barrier(group)
        place_now = {key: str(value) if key == "device" else value for key, value in asdict(place).items()}
        found = place_now | {"total": int(total), "listening": sorted(heard), "pid": os.getpid()}
        (folder / f"rank-{place.rank}.json").write_text(json.dumps(found))
    print(f"rank {place.rank} is done")


if __name__ == "__main__":
    main()
