"""Row 17: ten jobs that are launched at the same moment."""

import json
from pathlib import Path

import joins
from processes import LOOPBACK
from ranks import run_ranks
from scorecard import Asked, Fault, Tally

from shardwise.launch.launch import launch

NUM_LAUNCHES, RANKS_OF_EACH = 10, 2


def launch_one(rank: int, folder: str, program: str) -> int:
    """In a process of its own: one of the launches."""
    mine = Path(folder, str(rank))
    mine.mkdir()
    return launch([str(mine)], num_ranks=RANKS_OF_EACH, max_restarts=0, folder=mine / "run", program=program)


def ten_at_once(asked: Asked) -> Tally:
    tally = Tally()
    for repeat in range(asked.pick(short=1, long=3)):
        folder = asked.folder / str(repeat)
        folder.mkdir()
        codes = run_ranks(launch_one, num_ranks=NUM_LAUNCHES, args=(str(folder), joins.__file__), timeout_seconds=400.0)
        for number, code in enumerate(codes):
            with tally.trying(f"launch {number}"):
                logs = "".join(path.read_text()[-300:] for path in (folder / str(number)).glob("run/logs/*.txt"))
                assert code == 0, logs
                for rank in range(RANKS_OF_EACH):
                    found = json.loads((folder / str(number) / f"rank-{rank}.json").read_text())
                    assert found["total"] == sum(range(1 + RANKS_OF_EACH)), "it met ranks of another job"
                    assert found["listening"], "Gloo listens somewhere"
                    beyond = {address for address, _ in found["listening"]} - LOOPBACK
                    assert not beyond, f"listens on {beyond}"
    return tally


ROWS = [
    Fault(
        name="17",
        shows="ten launches of 2 ranks at once (long: three times)",
        must_be="no port failure, no listener beyond loopback",
        run=ten_at_once,
    )
]
