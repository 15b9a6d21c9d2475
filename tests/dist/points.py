"""What a rank of test_launch_points.py runs: `points.py POINT RANK` goes wrong in one way, on one rank or on all.

The other ranks do what ranks do then: they wait for it where no signal handler runs.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.base.errors import InvalidData
from shardwise.comm.groups.agreement import RanksDisagree, about
from shardwise.training.launch.failure import during, report

RANK = int(os.environ["RANK"])
# How much later than its peer's echo a rank fails, at a point that says so.
DELAY_SECONDS = float(os.environ.get("POINT_DELAY_SECONDS", "0.5"))


class Sticky:
    """Cannot be destroyed, like a group whose threads wait for peers."""

    def __del__(self) -> None:
        wait_for_ever()


def wait_for_ever() -> None:
    # In C, as in a collective: no handler of Python's runs.
    while True:
        ctypes.CDLL(None).sleep(1000)


def raise_value() -> None:
    raise ValueError("broken on purpose")


def raise_mistake() -> None:
    raise InvalidData("broken on purpose")


def command_line_mistake() -> None:
    try:
        raise_mistake()
    except InvalidData as error:
        print(f"InvalidData: {error}", file=sys.stderr)
        sys.exit(2)


def mistake_without_a_word() -> None:
    print("broken on purpose", file=sys.stderr)
    sys.exit(2)


def chained() -> None:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise ValueError("broken on purpose") from error


def in_a_group() -> None:
    raise ExceptionGroup("broken on purpose", [ValueError("one"), TypeError("two")])


def in_a_step() -> None:
    with during("step 17"):
        raise_value()


def too_deep() -> None:
    too_deep()


def no_memory() -> None:
    raise MemoryError("broken on purpose")


def exit_code() -> None:
    print("broken on purpose", file=sys.stderr)
    sys.exit(7)


def sticks_after_exit() -> None:
    sys.modules["sticky"] = Sticky()
    exit_code()


def exits_with_0() -> None:
    print("gone early", file=sys.stderr)
    os._exit(0)


def exit_at_once() -> None:
    os.write(2, b"broken on purpose\n")
    os._exit(5)


def not_an_exception() -> None:
    raise asyncio.CancelledError("broken on purpose")


def killed_by(number: signal.Signals) -> Callable[[], None]:
    def kill() -> None:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return kill


def null_pointer() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def sticks_in_a_destructor() -> None:
    sys.modules["sticky"] = Sticky()
    raise_value()


def sticks_in_a_handler() -> None:
    try:
        raise_value()
    except ValueError as error:
        report(error, rank=RANK)
        wait_for_ever()


def leaves_a_child() -> None:
    subprocess.Popen(["sleep", "1000"])
    raise_value()


def leaves_a_daemon() -> None:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
    raise_value()


def killed_with_a_child() -> None:
    subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)


def after_its_echo() -> None:
    time.sleep(DELAY_SECONDS)
    raise_value()


def exit_code_after_its_echo() -> None:
    time.sleep(DELAY_SECONDS)
    sys.exit(3)


def exits_with_0_after_its_echo() -> None:
    time.sleep(DELAY_SECONDS)
    os._exit(0)


def many_lines() -> None:
    raise ValueError("broken on purpose\n" + "and a line more\n" * 1000)


def not_text() -> None:
    raise ValueError("broken on purpose \udcff")


def device_lost() -> None:
    raise type("AcceleratorError", (RuntimeError,), {})("broken on purpose")


POINTS: dict[str, Callable[[], None]] = {
    "raise_value": raise_value,
    "raise_mistake": raise_mistake,
    "command_line_mistake": command_line_mistake,
    "mistake_without_a_word": mistake_without_a_word,
    "chained": chained,
    "in_a_group": in_a_group,
    "in_a_step": in_a_step,
    "too_deep": too_deep,
    "no_memory": no_memory,
    "exit_code": exit_code,
    "exit_at_once": exit_at_once,
    "sticks_after_exit": sticks_after_exit,
    "exits_with_0": exits_with_0,
    "not_an_exception": not_an_exception,
    "sigkill": killed_by(signal.SIGKILL),
    "sigterm": killed_by(signal.SIGTERM),
    "sigint": killed_by(signal.SIGINT),
    "null_pointer": null_pointer,
    "abort": abort,
    "sticks_in_a_destructor": sticks_in_a_destructor,
    "sticks_in_a_handler": sticks_in_a_handler,
    "leaves_a_child": leaves_a_child,
    "leaves_a_daemon": leaves_a_daemon,
    "killed_with_a_child": killed_with_a_child,
    "after_its_echo": after_its_echo,
    "exit_code_after_its_echo": exit_code_after_its_echo,
    "exits_with_0_after_its_echo": exits_with_0_after_its_echo,
    "never_reports": wait_for_ever,
    "many_lines": many_lines,
    "not_text": not_text,
    "device_lost": device_lost,
}


def main() -> None:
    point, failing, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    # As training does: a rank that is told to end saves first, if it comes to it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    (folder / f"started-{RANK}").touch()
    while len(list(folder.glob("started-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if failing == RANK:
        (folder / "failed-at").write_text(str(time.monotonic()))
        POINTS[point]()
    if (failing + 1) % 3 == RANK:
        # A peer that has lost its connection complains, at once or soon.
        time.sleep(0.0 if point.endswith("after_its_echo") else 0.3)
        raise about(RanksDisagree(f"rank {failing} could not continue"), failing)
    wait_for_ever()


if __name__ == "__main__":
    main()
