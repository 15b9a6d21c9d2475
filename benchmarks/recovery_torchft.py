"""Kills ranks of a training under torchft, as benchmarks/recovery.py does under Shardwise: same model, as many ranks.

python benchmarks/recovery_torchft.py --kills 8              needs torchft, which has wheels for x86-64 only
python benchmarks/recovery_torchft.py --average loop         averages gradients in the loop, without torchft's wrapper
python benchmarks/recovery_torchft.py --join-timeout 1000    milliseconds that the lighthouse waits for ranks; 10,000 as
                                                             in torchft's examples

As in torchft's own example for DDP: replica groups of one rank each, Gloo with a time-out of 5 s, each group restarted
by a torchrun of its own. Printed for each kill: the seconds until any rank makes a step again, how many steps that is
behind the last one, and the seconds until all ranks, the restarted one too, make a step together. The lighthouse logs
to stderr. As a program with REPLICA_GROUP_ID set, it is one rank.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

NUM_RANKS = 4
PASS_SECONDS = 0.15
LIMIT_SECONDS = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a kill has cost: seconds until the first step and until all ranks make one, and steps lost."""

    first: float
    behind: int
    together: float


def train(folder: Path, *, number: int) -> None:
    """Train until killed; append the time, the step and the number of ranks in it to a file."""
    import torch
    from kills_run import LR, MICRO_BATCH
    from kills_task import task
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    trained = task()
    inner = torch.optim.AdamW(trained.model.parameters(), lr=LR)

    def load(state: dict) -> None:
        trained.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": trained.model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"rank_{number}",
        timeout=timedelta(seconds=30),
    )
    in_loop = os.environ["AVERAGE"] == "loop"
    model = trained.model if in_loop else DistributedDataParallel(manager, trained.model)
    optimizer = Optimizer(manager, inner)
    (folder / f"process-{number}").write_text(str(os.getpid()))
    with (folder / f"steps-{number}").open("a", buffering=1) as steps:
        while True:
            optimizer.zero_grad()
            trained.loss(model, trained.make_batch(MICRO_BATCH)).backward()
            if in_loop:
                for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
                    work.wait()
            optimizer.step()
            steps.write(f"{time.time()} {manager.current_step()} {manager.num_participants()}\n")


class Job:
    """The lighthouse, and a torchrun for each rank."""

    def __init__(self, folder: Path, *, average: str, join_timeout: int) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self._average = folder, average
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=join_timeout
        )
        self._launchers = [self._start(number) for number in range(NUM_RANKS)]

    def _start(self, number: int) -> subprocess.Popen:
        variables = {
            "REPLICA_GROUP_ID": str(number),
            "TORCHFT_LIGHTHOUSE": self._lighthouse.address(),
            "AVERAGE": self._average,
            "OMP_NUM_THREADS": "1",
            "KILLS_PASS_SECONDS": str(PASS_SECONDS),
            "CUDA_VISIBLE_DEVICES": "",
        }
        run = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", f"--master-port={29600 + number}"]
        return subprocess.Popen(
            [sys.executable, *run, "--max-restarts=1000", __file__, str(self.folder)],
            env=os.environ | variables,
            stdout=(self.folder / f"output-{number}").open("a"),
            stderr=subprocess.STDOUT,
        )

    def steps(self) -> dict[int, list[tuple[float, int, int]]]:
        """Return each rank's steps so far: when, which, with how many ranks."""
        found: dict[int, list[tuple[float, int, int]]] = {}
        for number in range(NUM_RANKS):
            path = self.folder / f"steps-{number}"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            rows = [line.split() for line in lines if line.endswith("\n")]
            found[number] = [(float(when), int(step), int(ranks)) for when, step, ranks in rows]
        return found

    def wait_for(self, happened: Callable[[], bool], *, what: str) -> float:
        """Wait, and return when it happened."""
        deadline = time.time() + LIMIT_SECONDS
        while not happened():
            if time.time() > deadline:
                outputs = "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("output-*")))
                sys.exit(f"{what}: nothing for {LIMIT_SECONDS:g} s:\n{outputs}")
            time.sleep(0.01)
        return time.time()

    def first_after(self, moment: float) -> tuple[float, int] | None:
        """Return when a rank made the first step since, and which."""
        rows = [row for rows in self.steps().values() for row in rows if row[0] > moment]
        return min(rows)[:2] if rows else None

    def together_after(self, moment: float) -> bool:
        """Return whether all ranks have made a step together since."""
        return all(
            any(when > moment and ranks == NUM_RANKS for when, _, ranks in rows) for rows in self.steps().values()
        )

    def kill(self, *, chance: random.Random) -> Kill:
        """Kill a rank; return what it cost."""
        time.sleep(chance.uniform(2, 3))
        victim = chance.randrange(NUM_RANKS)
        last = max(step for rows in self.steps().values() for _, step, _ in rows)
        os.kill(int((self.folder / f"process-{victim}").read_text()), signal.SIGKILL)
        killed = time.time()
        # What all ranks had averaged when it died is still a step of all of them.
        settled = killed + 2 * PASS_SECONDS
        self.wait_for(lambda: self.first_after(settled) is not None, what="a step")
        first = self.first_after(settled)
        assert first is not None
        together = self.wait_for(lambda: self.together_after(settled), what="a step of all ranks")
        return Kill(first=first[0] - killed, behind=max(0, last + 1 - first[1]), together=together - killed)

    def end(self) -> None:
        for launcher in self._launchers:
            launcher.terminate()
        for launcher in self._launchers:
            launcher.wait()
        self._lighthouse.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--average", choices=["wrapper", "loop"], default="wrapper")
    parser.add_argument("--join-timeout", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-torchft-") as name:
        job = Job(Path(name), average=args.average, join_timeout=args.join_timeout)
        try:
            job.wait_for(lambda: job.together_after(0), what="the start")
            chance, done = random.Random(args.seed), []
            for _ in range(args.kills):
                done.append(job.kill(chance=chance))
                print(f"  {done[-1]}", flush=True)
        finally:
            job.end()
    titles = ("seconds until a step", "steps lost", "seconds until a step of all ranks")
    for title, values in zip(titles, zip(*map(astuple, done), strict=True), strict=True):
        print(f"{title}: median {median(values):.1f}, at most {max(values):.1f}")


if __name__ == "__main__":
    if "REPLICA_GROUP_ID" in os.environ:
        train(Path(sys.argv[1]), number=int(os.environ["REPLICA_GROUP_ID"]))
    else:
        main()
