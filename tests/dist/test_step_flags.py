"""Numbers that ranks exchange after each step: the largest, one step later, the same on every rank."""

from functools import partial

import pytest
from ranks import run_ranks

from shardwise.comm.groups.step_flags import StepFlags


def exchanged(rank: int, num_steps: int) -> list[dict[str, int]]:
    flags, values = StepFlags(), {"stop": 0, "least": -100}
    for name in values:
        flags.register(name, partial(values.__getitem__, name))
    agreed = []
    for step in range(num_steps):
        # Rank 1 is one behind.
        values |= {"stop": int(rank == 1 and step == 2), "least": -(step - rank)}
        flags.exchange()
        agreed.append(flags.agreed)
    flags.close()
    return agreed


@pytest.mark.timeout(60)
def test_ranks_read_the_largest_number_of_the_previous_step() -> None:
    one, other = run_ranks(exchanged, num_ranks=2, args=(5,))
    assert one == other
    assert [now["stop"] for now in one] == [0, 0, 0, 1, 0]
    assert [-now["least"] for now in one] == [100, -1, 0, 1, 2]
