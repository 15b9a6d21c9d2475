"""`python -m shardwise.training.launch.rank_process PROGRAM ARGUMENTS…`: the process of each rank of the launcher.

It binds the process to its launcher and its log, then runs the program (a module, or a file that ends in .py) in this
process, and reports errors that the program does not catch. No torch here: if the launcher is killed while its ranks
still import, they must end too.
"""

import ctypes
import faulthandler
import gc
import io
import os
import runpy
import signal
import sys

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.data_file import read_content
from shardwise.comm.job.job_environment import start_of
from shardwise.training.launch.failure import announce_exit, report, stalls_reported, write_to_log
from shardwise.training.launch.stop_signals import STOP_SIGNALS

# The variable that holds the launcher's process id.
LAUNCHER = "SHARDWISE_LAUNCHER"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# Fields of /proc/PID/stat, counted from 1: where the command line begins and ends in memory.
_ARGUMENTS = (48, 49)
_MOST_STAT_BYTES = 4096


def main() -> None:
    """Run the program that the arguments name, as one rank."""
    end_with(int(os.environ[LAUNCHER]))
    start = start_of(os.environ)
    rank = start.rank
    _show_as(f"shardwise rank {rank} of {start.num_ranks}: {' '.join(sys.argv[1:])}", name=f"shardwise {rank}")
    if rank != 0:
        write_to_log(1, 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # So that output is complete even if the process is killed.
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    # Blocked until training handles them (preemption.py): while a rank starts, there is nothing to save.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with stalls_reported():
            run(*sys.argv[1:])
    except SystemExit as end:
        # The command line has turned a user's mistake into an exit code.
        if isinstance(end.__context__, ShardwiseError):
            report(end.__context__, rank=rank)
        elif end.code not in (None, 0):
            announce_exit(end.code if isinstance(end.code, int) else 1)
        raise
    except Exception as error:
        report(error, rank=rank)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException:
        announce_exit(1)
        raise
    finally:
        # Saves the interpreter's last garbage collection, a second in which other ranks wait.
        gc.freeze()


def run(program: str, *arguments: str) -> None:
    """Do what `python program arguments…`, or `python -m program arguments…` for a module, would do."""
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def end_with(launcher: int) -> None:
    """Have the kernel kill this process when its parent, the launcher, ends in any way."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:
        # It has ended already.
        os.kill(os.getpid(), signal.SIGKILL)


def _show_as(title: str, *, name: str) -> None:
    """Show this in ps instead of the command line, which of a forked rank is that of what it was forked from.

    The kernel reads a command line from where it lay at the start, as much as there is room for. `name`: for top.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    # Those after the name, which is in brackets, from the third on.
    fields = read_content("/proc/self/stat", most_bytes=_MOST_STAT_BYTES).rpartition(b")")[2].split()
    first, last = (int(fields[number - 3]) for number in _ARGUMENTS)
    if first < last:
        # A kernel that hides the addresses says 0.
        room = last - first - 1
        ctypes.memmove(first, title.encode(errors="replace")[:room].ljust(room + 1, b"\0"), room + 1)


if __name__ == "__main__":
    main()
