"""`python -m shardwise.training.launch.warm_process SOCKET MODULES…`: imports what ranks need, then forks them.

Most of a start is imports, several seconds of CPU time; a fork takes milliseconds. This process starts no threads and
never touches a GPU, so that forks of it are as good as new processes. A rank is forked twice: its parent exits, and the
launcher, a subreaper, becomes its parent, as for a rank that it has started itself.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from typing import Any

from shardwise.base.vocabulary.collection import without_collection
from shardwise.training.launch import rank_process

READY = b"ready\n"
_CUDA_NOT_INITIALIZED = 3


def main() -> None:
    """Import, then fork a rank for each request, until the launcher closes the socket. A rank returns from here."""
    link = socket.socket(fileno=int(sys.argv[1]))
    rank_process.end_with(os.getppid())
    # The launcher's terminal signals all of its processes; ranks decide for themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # All that is imported stays: a fourth of the time would go into looking for garbage among it.
    with without_collection():
        for name in sys.argv[2:]:
            importlib.import_module(name)
        # Nor is it visited later, so that its pages stay shared with all ranks.
        gc.freeze()
    if _uses_gpu():
        return
    link.sendall(READY)
    with link.makefile("r") as requests:
        for line in requests:
            if _forked(json.loads(line), link=link):
                break
        else:
            return
    link.close()
    rank_process.main()


def _uses_gpu() -> bool:
    """Return whether an import has started CUDA's driver, which no fork could use then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_NOT_INITIALIZED)


def _forked(request: dict[str, Any], *, link: socket.socket) -> bool:
    """Fork a rank, and send its process id; return True in the rank."""
    launcher = int(request["env"][rank_process.LAUNCHER])
    number, sent = os.pipe()
    between = os.fork()
    if between:
        # First: from then on the launcher is the rank's parent, and can wait for it.
        os.waitpid(between, 0)
        link.sendall(os.read(number, 32))
        os.close(number)
        os.close(sent)
        return False
    rank = os.fork()
    if rank:
        os.write(sent, f"{rank}\n".encode())
        os._exit(0)
    os.close(number)
    os.close(sent)
    while os.getppid() != launcher:
        time.sleep(0.001)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["", *request["words"]]
    # A new process has other random numbers than its siblings.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return True


if __name__ == "__main__":
    main()
