"""The wait for the slowest node. No torch here.

Nodes take different times for a step: clocks, hosts and networks vary. Ranks that communicate wait for the slowest. If
the times of N nodes are normal with a relative deviation σ, a step takes as long as the largest of N:

    step = own time · (1 + σ · E[max of N standard normals])

with a second such term for the nodes over which units are gathered.

Devices of one node share its host and its links, and kernel constants were fitted to complete nodes: a single node does
not wait.
"""

from functools import lru_cache
from statistics import NormalDist

from shardwise.hardware import Cluster
from shardwise.planner.time.collective import Rings

DEVIATION = 0.02
"""σ of a step, at whose end all nodes wait. Fitted to BERT-Large under DDP (8 to 256 A100: 0.949 of linear) and
Llama-3-70B under hybrid sharding (128 to 2,048 H100: 0.979). Sinha et al., "Not All GPUs Are Created Equal" (SC 2022)
found that equal GPUs of one cluster differ by up to 8%, which is a deviation of 0.02 for some hundreds."""

DEVIATION_IN_UNITS = 0.02
"""Additional σ for nodes over which units are gathered: their ranks synchronize in every unit, so that the delays of
different nodes add up instead of averaging out over a step. Fitted to MPT under FSDP (7B on 8 to 512 H100: 0.909 of
linear; 70B on 128 to 512: 0.952)."""


def straggler_share(rings: Rings, *, cluster: Cluster, gathers: bool) -> float:
    """Return the wait for the slowest node as a share of a step. `gathers`: parameters are sharded."""
    in_units = expected_maximum(rings.shard.num_nodes) if gathers else 0.0
    return DEVIATION * expected_maximum(cluster.num_nodes) + DEVIATION_IN_UNITS * in_units


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Return E[max] of `count` standard normals (Blom 1958): 0 for 1, 0.59 for 2, 1.43 for 8, 2.50 for 100."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
