"""A rank without torch, for what the launcher does: `light.py WHAT FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

RANK, RESTARTS = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
what, folder = sys.argv[1], Path(sys.argv[2])


def save(number: int, frame: object) -> None:
    time.sleep(0.2)
    (folder / f"saved-{RANK}").touch()
    sys.exit(0)


def started(rank: int = RANK) -> Path:
    return folder / f"started-{rank}-{RESTARTS}"


if what == "saves":
    signal.signal(signal.SIGTERM, save)
elif what == "waits":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif what == "saves-late":
    # The signal comes before the handler, and must wait for it.
    started().touch()
    while not (folder / "signalled").exists():
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, save)
# As training does when it can take it.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
started().touch()
print(f"rank {RANK} speaks")
if what == "ends" or (what == "dies" and RESTARTS == 2):
    sys.exit(0)
if what == "dies" and RANK == 1:
    while not started(rank=0).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
