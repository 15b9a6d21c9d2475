"""Memory and speed of the Accelerate pair on 2 NCCL ranks: DDP, FSDP and FSDP2 on a Vision Transformer.

PYTHONPATH=src python benchmarks/accelerate_vit.py     →  benchmarks/results/accelerate_vit.json

Every case is accelerate/train.py in fresh processes, on random images, with the repository's config files.
With two GPUs `accelerate launch` starts it. With one, both ranks share it: that measures memory, but its
samples/s are no speed result (`"shared_gpu": true`). Each peak comes with an account by formula.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch  # noqa: E402
from profile_memory import activation_bytes, adamw_temporary_bytes, block_params  # noqa: E402

from shardwise.models.catalogue import shape_of  # noqa: E402
from shardwise.models.shapes import ViTShape  # noqa: E402
from shardwise.plan.placement import SHARDED, STRATEGIES, Where  # noqa: E402

NUM_RANKS = 2
# What a published guide reports for ViT-Large on two A100-40GB.
PUBLISHED = {"ddp_gb": 18.0, "fsdp_gb": 10.0, "ddp_samples_per_s": 450.0, "fsdp_samples_per_s": 380.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config file, what the command line changes in it, and what it means in our words."""

    name: str
    config: str
    strategy: str
    launch_options: tuple[str, ...] = ()
    # Bytes of a number that a norm reads: autocast makes it float32, FSDP2 runs without autocast.
    stream_bytes: int = 4


CASES = (
    Case(name="ddp", config="config_ddp.yaml", strategy="ddp"),
    Case(name="fsdp_full_shard", config="config_fsdp.yaml", strategy="fsdp"),
    Case(
        name="fsdp_shard_grad_op",
        config="config_fsdp.yaml",
        strategy="shard_grad_op",
        launch_options=("--fsdp_sharding_strategy", "SHARD_GRAD_OP"),
    ),
    Case(name="fsdp2", config="config_fsdp2.yaml", strategy="fsdp", stream_bytes=2),
)


def vit_shape(size: str) -> ViTShape:
    shape = shape_of(f"vit-{size}")
    assert isinstance(shape, ViTShape)
    return shape


def items_bytes(case: Case, *, shape: ViTShape, ranks: int = NUM_RANKS) -> dict[str, int]:
    """What a rank holds by formula, under float16 mixed precision, apart from activations.

    autocast_copies: under DDP, the float16 copies of weights that forward leaves for backward: those of the
    matrix products and of the patch convolution, not biases, norms and tokens.
    gathered: under FSDP, the parameters in float16: all or, where they are freed after forward, the root's,
    one block's and those of the block that is prefetched.
    """
    placement = STRATEGIES[case.strategy]

    def held(num_bytes: int, where: Where) -> int:
        return -(-num_bytes // ranks) if where is SHARDED else num_bytes

    whole, width = 4 * shape.num_params, shape.width
    sharded = placement.params is SHARDED
    weights = width * (12 * shape.num_layers * width + shape.num_classes)
    weights += width * shape.num_channels * shape.patch_size**2
    blocks = block_params(shape)
    root = shape.num_params - shape.num_layers * blocks
    gathered = root + 2 * blocks if placement.reshard_after_forward else shape.num_params
    return {
        "params": held(whole, placement.params),
        "grads": held(whole, placement.grads),
        "optim": held(2 * whole, placement.optim),
        # DDP reduces copies of the gradients, in buckets that it keeps.
        "ddp_buckets": 0 if sharded else whole,
        "autocast_copies": 0 if sharded else 2 * weights,
        "gathered": 2 * gathered if sharded else 0,
        "optimizer_temporaries": held(adamw_temporary_bytes(shape, foreach=True), placement.optim),
    }


# What is alive at each point. Gradients and activations are hardly ever alive together: zero_grad frees the
# former before forward, and backward frees a block's activations as it makes that block's gradients.
ALIVE = {
    "after_prepare": ("params", "ddp_buckets"),
    "after_first_backward": ("params", "ddp_buckets", "grads"),
    "after_first_step": ("params", "ddp_buckets", "grads", "optim"),
    "peak_of_backward": ("params", "ddp_buckets", "optim", "autocast_copies", "gathered"),
    "peak_of_step": ("params", "ddp_buckets", "grads", "optim", "optimizer_temporaries"),
}


def account(case: Case, *, shape: ViTShape, batch_size: int, rank: Mapping[str, Any]) -> dict[str, Any]:
    """The measured bytes of a rank at each point, what the formulas explain of them, and the rest."""
    items = items_bytes(case, shape=shape)
    measured = dict(rank["allocated_bytes"])
    measured |= {f"peak_of_{phase}": peak for phase, peak in rank["peak_by_phase_bytes"].items()}
    points = {}
    for point, names in ALIVE.items():
        if point in measured:
            explained = sum(items[name] for name in names)
            points[point] = {
                "measured_bytes": measured[point],
                "formula_bytes": explained,
                "counted": names,
                "rest_bytes": measured[point] - explained,
            }
    activations = activation_bytes(shape, batch_size=batch_size, stream_bytes=case.stream_bytes, matmul_bytes=2)
    return {"items_bytes": items, "points": points, "activations_by_formula_bytes": activations}


def savings(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each case's peak against DDP's of the same batch size, item by item, at the peak of backward."""
    rows = []
    for case in cases:
        batch_size = case["batch_size"]
        ddp = next((c for c in cases if (c["name"], c["batch_size"]) == ("ddp", batch_size)), case)
        if case is ddp or case["error"] or ddp["error"]:
            continue
        before, after = (c["ranks"][0]["peak_allocated_bytes"] for c in (ddp, case))
        ours, theirs = (c["account"]["items_bytes"] for c in (case, ddp))
        by_item = {name: theirs[name] - ours[name] for name in ALIVE["peak_of_backward"]}
        rows.append(
            {
                "name": case["name"],
                "batch_size": batch_size,
                "saving_bytes": before - after,
                "saving_fraction": 1 - after / before,
                "by_item_bytes": by_item,
                "rest_bytes": before - after - sum(by_item.values()),
            }
        )
    return rows


def published_account() -> dict[str, Any]:
    """The published saving against every item, also those that are not alive together: an upper bound."""
    ddp, fsdp = (items_bytes(case, shape=vit_shape("large")) for case in CASES[:2])
    by_item = {name: (ddp[name] - fsdp[name]) / 1e9 for name in ddp}
    saving = PUBLISHED["ddp_gb"] - PUBLISHED["fsdp_gb"]
    return {
        **PUBLISHED,
        "saving_gb": saving,
        "by_item_gb": by_item,
        "at_the_peak_of_backward_gb": sum(by_item[name] for name in ALIVE["peak_of_backward"]),
        "all_items_gb": sum(by_item.values()),
        "not_explained_gb": saving - sum(by_item.values()),
    }


def launch_environment(case: Case) -> dict[str, str]:
    """What `accelerate launch` would export for a config file, by its own code."""
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
    """The processes of a case, each with its environment: one launcher, or the ranks by hand."""
    script = ["accelerate/train.py", *training]
    if not shared_gpu:
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        options = ["--config_file", f"accelerate/{case.config}", *case.launch_options]
        return [([*launch, *options, "--main_process_port", "0", *script], dict(os.environ))]
    port = str(free_port())
    ranks = []
    for rank in range(NUM_RANKS):
        environment = launch_environment(case) | {
            "RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            # NCCL refuses two ranks on one GPU unless they seem to be on two hosts.
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(([sys.executable, *script], environment))
    return ranks


def run(processes: Sequence[tuple[list[str], dict[str, str]]], *, limit_s: float) -> str | None:
    """Run the processes of one case together; the error, where there is one.

    When one fails or the time is up, all are ended: a rank whose peer is gone would wait for ever.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = [
            subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            for command, env in processes
        ]
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
    """Train under one config and account for its memory."""
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
        "account": result
        and account(case, shape=vit_shape(args.model_size), batch_size=batch_size, rank=result["ranks"][0]),
    }


def print_table(cases: Sequence[Mapping[str, Any]], *, shared_gpu: bool) -> None:
    print(f"\n{'case':20} {'batch':>5} {'peak GB':>8} {'reserved':>8} {'saved':>6} {'samples/s':>9}  loss")
    for case in cases:
        if case["error"]:
            print(f"{case['name']:20} {case['batch_size']:>5} failed: {case['error'].splitlines()[0]}")
            continue
        rank = case["ranks"][0]
        saved = [r for r in savings(cases) if (r["name"], r["batch_size"]) == (case["name"], case["batch_size"])]
        percent = f"{saved[0]['saving_fraction']:6.0%}" if saved else " " * 6
        print(
            f"{case['name']:20} {case['batch_size']:>5} {rank['peak_allocated_bytes'] / 1e9:8.2f} "
            f"{rank['peak_reserved_bytes'] / 1e9:8.2f} {percent} {case['samples_per_s']:9.1f}  "
            f"{case['losses'][0]:.3f} → {case['losses'][-1]:.3f}"
        )
    if shared_gpu:
        print("Both ranks share one GPU: samples/s is not a speed result.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The Accelerate pair on 2 NCCL ranks.")
    parser.add_argument("--model-size", choices=("tiny", "small", "base", "large", "huge"), default="large")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 44], help="for each rank")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--num-workers", type=int, default=4, help="processes that make images, for each rank")
    parser.add_argument("--case-limit-s", type=float, default=90, help="the most that one case may take")
    parser.add_argument("--limit-s", type=float, default=340, help="the most that all cases may take")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/accelerate_vit.json")
    return parser.parse_args()


def own_command(args: argparse.Namespace) -> str:
    """What reproduces this run, wherever its result was written to."""
    words = [
        *("--model-size", args.model_size, "--batch-sizes", *args.batch_sizes, "--cases", *args.cases),
        *("--warmup-steps", args.warmup_steps, "--steps", args.steps, "--num-workers", args.num_workers),
    ]
    return f"PYTHONPATH=src python benchmarks/accelerate_vit.py {shlex.join(map(str, words))}"


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available():
        print("accelerate_vit.py: needs at least one GPU", file=sys.stderr)
        return 2
    shared_gpu = torch.cuda.device_count() < NUM_RANKS
    whole: dict[str, Any] = {
        "command": own_command(args),
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": torch.cuda.device_count(),
        "shared_gpu": shared_gpu,
        "versions": {
            "torch": torch.__version__,
            "accelerate": version("accelerate"),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        },
        "published": published_account(),
        "cases": [],
    }
    deadline = time.monotonic() + args.limit_s
    for batch_size in args.batch_sizes:
        for case in (case for case in CASES if case.name in args.cases):
            limit_s = min(args.case_limit_s, deadline - time.monotonic())
            print(f"{case.name}, batch {batch_size} …", end=" ", flush=True)
            done = run_case(case, batch_size=batch_size, shared_gpu=shared_gpu, limit_s=limit_s, args=args)
            print(f"{'failed' if done['error'] else 'done'} in {done['seconds']:.0f} s", flush=True)
            whole["cases"].append(done)
            whole["savings"] = savings(whole["cases"])
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(whole, indent=2) + "\n")
    print_table(whole["cases"], shared_gpu=shared_gpu)
    print(f"written: {args.out}")
    return 1 if any(case["error"] for case in whole["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
