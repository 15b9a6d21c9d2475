"""A rank's program that kills its rank 1 at the first start; at the second it says what it is."""

import sys

# Before anything is imported here.
FORKED = "shardwise.engines" in sys.modules

import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL if rank == 1 else 0)
        time.sleep(100)
    print(f"rank {rank} speaks")
    import torch
    import torch.distributed as dist

    from shardwise.comm.job.join import joined

    with joined(torch.device("cpu")):
        total = torch.ones(4)
        dist.all_reduce(total)
    found = {
        "forked": FORKED,
        "parent": os.getppid() == int(os.environ["SHARDWISE_LAUNCHER"]),
        "leads": os.getpgid(0) == os.getpid(),
        "total": total.tolist(),
        "threads": torch.get_num_threads(),
        "random": random.random(),
        "words": sys.argv[2:],
        "shown": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0"),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if "fail" in sys.argv:
        raise ValueError("as asked")


if __name__ == "__main__":
    main()
