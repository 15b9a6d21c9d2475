"""How long the command line takes to answer: medians of fresh processes.

python benchmarks/startup.py
"""

import statistics
import subprocess
import sys
import time

COMMANDS = (["--help"], ["--version"], ["models", "--json"])


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "shardwise", *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    times: dict[str, list[float]] = {" ".join(command): [] for command in COMMANDS}
    for _ in range(11):
        for command in COMMANDS:
            times[" ".join(command)].append(seconds(command))
    for name, values in times.items():
        print(f"shardwise {name:14} median {statistics.median(values):.3f} s, slowest {max(values):.3f} s")


if __name__ == "__main__":
    main()
