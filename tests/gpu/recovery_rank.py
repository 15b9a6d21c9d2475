"""One of two NCCL ranks that share a GPU, of a training that is kept in memory: `python recovery_rank.py STRATEGY FOLDER`.

Started by our launcher; kills itself once as KILL says (tests/dist/protected.py).
"""

import os

import torch
from protected import main

if __name__ == "__main__":
    # Two ranks on one GPU: NCCL refuses them unless they seem to be on two machines.
    os.environ.update(NCCL_HOSTID=f"host{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    main("cuda:0")
