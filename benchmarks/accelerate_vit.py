"""Memory and speed of the Accelerate pair on 2 NCCL ranks: DDP, FSDP and FSDP2 on a Vision Transformer.

PYTHONPATH=src python benchmarks/accelerate_vit.py     →  benchmarks/results/accelerate_vit.json

Every case is accelerate/train.py in fresh processes, on random images, with the repository's config files.
With two GPUs `accelerate launch` starts it. With one, both ranks share it: that measures memory, but its
samples/s are no speed result (`"shared_gpu": true`).
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, circumstances, write

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config file, and what the command line changes in it."""

    name: str
    config: str
    launch_options: tuple[str, ...] = ()


_GRAD_OP = ("--fsdp_sharding_strategy", "SHARD_GRAD_OP")
CASES = (
    Case(name="ddp", config="config_ddp.yaml"),
    Case(name="fsdp_full_shard", config="config_fsdp.yaml"),
    Case(name="fsdp_shard_grad_op", config="config_fsdp.yaml", launch_options=_GRAD_OP),
    Case(name="fsdp2", config="config_fsdp2.yaml"),
)


def saving(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the peak of DDP at the same batch size that a case saves."""
    for ddp in cases:
        if (ddp["name"], ddp["batch_size"]) == ("ddp", case["batch_size"]) and ddp is not case and not ddp["error"]:
            after, before = (one["ranks"][0]["peak_allocated_bytes"] for one in (case, ddp))
            return float(1 - after / before)
    return None


def launch_environment(case: Case) -> dict[str, str]:
    """Return what `accelerate launch` would export for a config file, by its own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = ["--config_file", str(ROOT / "accelerate" / case.config), *case.launch_options]
    args = launch_command_parser().parse_args([*options, "--main_process_port", "0", "accelerate/train.py"])
    return prepare_multi_gpu_env(_validate_launch_command(args)[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(case: Case, *, training: Sequence[str], shared_gpu: bool) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes of a case, each with its environment: one launcher, or the ranks by hand."""
    script = ["accelerate/train.py", *training]
    if not shared_gpu:
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        options = ["--config_file", f"accelerate/{case.config}", *case.launch_options]
        return [([*launch, *options, "--main_process_port", "0", *script], dict(os.environ))]
    meet = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meet |= {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    # NCCL refuses two ranks on one GPU unless they seem to be on two hosts.
    return [
        ([sys.executable, *script], launch_environment(case) | meet | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"})
        for rank in range(NUM_RANKS)
    ]


def run(processes: Sequence[tuple[list[str], dict[str, str]]], *, limit_s: float) -> str | None:
    """Run the processes of one case together; return the error, where there is one.

    When one fails or the time is up, all are ended: a rank whose peer is gone would wait for ever.
    """
    with tempfile.TemporaryFile("w+") as output:
        common: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        started = [subprocess.Popen(command, env=env, cwd=ROOT, **common) for command, env in processes]
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [process.poll() for process in started]
        if any(codes):
            time.sleep(2)  # What the others have to say belongs to the error.
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        tail = output.read()[-2000:]
    if any(codes):
        return f"exit codes {codes}: {tail}"
    return f"not done after {limit_s:.0f} s: {tail}" if None in codes else None


def run_case(
    case: Case, *, batch_size: int, shared_gpu: bool, limit_s: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Train under one config."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        options = {
            "--model-size": args.model_size,
            "--dataset": "random",
            "--batch-size": batch_size,
            "--warmup-steps": args.warmup_steps,
            "--max-steps": args.warmup_steps + args.steps,
            "--num-workers": args.num_workers,
            "--json": result_file,
        }
        training = ["--skip-eval", *(str(part) for option in options.items() for part in option)]
        processes = commands(case, training=training, shared_gpu=shared_gpu)
        error = run(processes, limit_s=limit_s) if limit_s > 10 else "not run: the time for all cases is up"
        result = {} if error else json.loads(result_file.read_text())
    command, environment = processes[0]
    return {
        **asdict(case),
        "batch_size": batch_size,
        "command": shlex.join(["python", *command[1:]]).replace(f"{folder}/", ""),
        # Of rank 0; the others differ in RANK and NCCL_HOSTID.
        "environment": {key: value for key, value in environment.items() if os.environ.get(key) != value},
        "seconds": time.monotonic() - start,
        "error": error,
        **result,
    }


def print_table(cases: Sequence[Mapping[str, Any]], *, shared_gpu: bool) -> None:
    print(f"\n{'case':20} {'batch':>5} {'peak GB':>8} {'reserved':>8} {'saved':>6} {'samples/s':>9}  loss")
    for case in cases:
        what = f"{case['name']:20} {case['batch_size']:>5}"
        if case["error"]:
            print(f"{what} failed: {case['error'].splitlines()[0]}")
            continue
        rank, share = case["ranks"][0], saving(case, cases)
        print(
            f"{what} {rank['peak_allocated_bytes'] / 1e9:8.2f} {rank['peak_reserved_bytes'] / 1e9:8.2f} "
            f"{'' if share is None else f'{share:.0%}':>6} {case['samples_per_s']:9.1f}  "
            f"{case['losses'][0]:.3f} → {case['losses'][-1]:.3f}"
        )
    if shared_gpu:
        print("Both ranks share one GPU: samples/s is not a speed result.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-size", choices=("tiny", "small", "base", "large", "huge"), default="large")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 44], help="for each rank")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--num-workers", type=int, default=4, help="processes that make images, for each rank")
    parser.add_argument("--case-limit-s", type=float, default=90, help="the most that one case may take")
    parser.add_argument("--limit-s", type=float, default=340, help="the most that all cases may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "accelerate_vit.json")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available():
        print("accelerate_vit.py: needs at least one GPU", file=sys.stderr)
        return 2
    shared_gpu = torch.cuda.device_count() < NUM_RANKS
    cases: list[dict[str, Any]] = []
    deadline = time.monotonic() + args.limit_s
    for batch_size in args.batch_sizes:
        for case in (case for case in CASES if case.name in args.cases):
            limit_s = min(args.case_limit_s, deadline - time.monotonic())
            print(f"{case.name}, batch {batch_size} …", end=" ", flush=True)
            done = run_case(case, batch_size=batch_size, shared_gpu=shared_gpu, limit_s=limit_s, args=args)
            print(f"{'failed' if done['error'] else 'done'} in {done['seconds']:.0f} s", flush=True)
            cases.append(done)
            write(args.out, {**circumstances(), "shared_gpu": shared_gpu, "cases": cases})
    print_table(cases, shared_gpu=shared_gpu)
    print(f"written: {args.out}")
    return 1 if any(case["error"] for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
