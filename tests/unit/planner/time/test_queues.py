"""The four queues, on schedules small enough to follow by hand."""

import pytest

from shardwise.planner.time.queues import COMPUTE, LOAD, MARK, SEND, STREAM, WAIT, Instruction, Queues

SECOND = [(0.0, 1.0, 1.0)]


def run(*instructions: Instruction, works: list[tuple[float, float, float]] = SECOND, slowdown: float = 0.0) -> Queues:
    queues = Queues(slowdown=slowdown)
    queues.run(instructions, works)
    return queues


def test_a_gather_behind_compute_is_hidden() -> None:
    queues = run(
        Instruction(SEND, "gather b", seconds=0.6), Instruction(COMPUTE, "forward a"), Instruction(WAIT, "gather b")
    )
    assert (queues.compute, queues.exposed) == (1.0, 0.0)


def test_what_is_longer_than_compute_is_exposed() -> None:
    queues = run(
        Instruction(SEND, "gather b", seconds=1.5), Instruction(COMPUTE, "forward a"), Instruction(WAIT, "gather b")
    )
    assert queues.compute == 1.5
    assert queues.exposed == pytest.approx(0.5)


def test_a_collective_waits_for_what_was_computed_before_it_was_issued() -> None:
    queues = run(Instruction(COMPUTE, "backward a"), Instruction(SEND, "reduce a", seconds=0.5))
    assert queues.wire == 1.5


def test_two_collectives_share_the_wire() -> None:
    queues = run(Instruction(SEND, "gather a", seconds=1.0), Instruction(SEND, "reduce b", seconds=1.0))
    assert queues.wire == 2.0


def test_compute_under_communication_is_slower_only_while_it_lasts() -> None:
    queues = run(Instruction(SEND, "gather b", seconds=0.5), Instruction(COMPUTE, "forward a"), slowdown=0.2)
    assert queues.compute == pytest.approx(1.1)
    assert queues.slowed == pytest.approx(0.1)


def test_small_kernels_wait_for_the_cpu() -> None:
    # Ten operations that take the CPU 40 and the device 4 each.
    works = [(400.0, 40.0, 404.0)]
    queues = run(Instruction(COMPUTE, "forward a"), Instruction(COMPUTE, "forward b"), works=works)
    assert (queues.cpu, queues.compute) == (800.0, 804.0)


def test_a_cpu_is_ahead_of_a_device_that_waits_by_what_its_queue_holds() -> None:
    queues = Queues(slowdown=0.0, lead=2.0)
    wait = [Instruction(SEND, "gather a", seconds=10.0), Instruction(WAIT, "gather a")]
    queues.run([*wait, *[Instruction(COMPUTE, "forward a")] * 5], [(1.0, 0.1, 1.1)])
    # By second 10 two of five are issued.
    assert (queues.cpu, queues.compute) == (13.0, pytest.approx(13.1))


def test_waiting_behind_a_slow_cpu_is_not_exposed_communication() -> None:
    queues = run(Instruction(SEND, "gather a", seconds=1.0), Instruction(WAIT, "gather a", launch=2.0))
    assert queues.exposed == 0.0


def unit(name: str, *, after: str, seconds: float) -> list[Instruction]:
    """A unit that gathers the next one while it computes."""
    return [
        Instruction(SEND, f"gather {after}", seconds=seconds),
        Instruction(COMPUTE, name),
        Instruction(WAIT, f"gather {after}"),
    ]


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("slowdown", [0.0, 0.15])
def test_a_unit_that_stands_for_many_takes_as_long_as_they_do(seconds: float, slowdown: float) -> None:
    every = [one for n in range(100) for one in unit(str(n), after=str(n + 1), seconds=seconds)]
    few = [one for n in range(3) for one in unit(str(n), after=str(n + 1), seconds=seconds)]
    few += [Instruction(MARK, "2"), *unit("3", after="4", seconds=seconds), Instruction(MARK, "3", 1, 0.0, 96.0)]
    few += unit("4", after="5", seconds=seconds)
    whole, short = run(*every, slowdown=slowdown), run(*few, slowdown=slowdown)
    assert short.compute == pytest.approx(whole.compute)
    assert short.exposed == pytest.approx(whole.exposed)
    assert short.sent == pytest.approx(whole.sent)


def test_a_load_delays_the_updates_that_are_still_queued_on_the_link() -> None:
    updates = [Instruction(STREAM, f"update {unit}", seconds=4.0) for unit in "abc"]
    queues = run(*updates, Instruction(LOAD, "gather a", seconds=1.0))
    # The load of a begins when a is updated, at half the speed; meanwhile the update of b is half as fast too.
    assert queues.ends == {"update b": 9.0, "update c": 13.0, "gather a": 6.0}
    assert (queues.host, queues.loads) == (13.0, 6.0)
    # Once for each load, also where an update of the same name was queued in an earlier step.
    queues.restart(cpu=0.0)
    queues.run([Instruction(LOAD, "gather b", seconds=1.0)], SECOND)
    assert queues.ends["update c"] == 14.0


def test_a_load_delays_no_update_that_is_over() -> None:
    queues = run(
        Instruction(STREAM, "update a", seconds=1.0),
        Instruction(STREAM, "update b", seconds=1.0),
        Instruction(LOAD, "gather c", seconds=5.0),
        Instruction(LOAD, "gather a", seconds=1.0),
    )
    assert queues.ends["update b"] == pytest.approx(7.0)
    queues.run([Instruction(LOAD, "gather d", seconds=1.0)], SECOND)
    assert queues.ends["update b"] == pytest.approx(7.0)
