"""A step as single allocations: which one a release is of."""

from shardwise.planner.memory.allocations import Ledger
from shardwise.planner.memory.replay import Change, MemoryRow
from shardwise.program.spec.step import Line


def test_a_release_is_of_the_buffer_of_its_own_stream() -> None:
    """A unit of one parameter: its flat buffer and the parameter have one size, and the parameter is freed first."""
    ledger = Ledger(grads_leave_at_once=False)
    changes = [
        Change("gathered", 512, stream="gather"),
        Change("gathered", 512),
        Change("gathered", -512),
        Change("gathered", -512, stream="gather"),
    ]
    ledger.write([MemoryRow(label="before forward head", unit="head", changes=changes)])
    assert ledger.sizes == {Line(512, 0): 0}
    assert ledger.entries == [(1, 0, "gather"), (2, 0, ""), (2, -1, ""), (1, -1, "")]
