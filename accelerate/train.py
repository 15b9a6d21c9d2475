"""Trains a Vision Transformer with Hugging Face Accelerate; the config file chooses DDP or FSDP.

accelerate launch --config_file accelerate/config_ddp.yaml accelerate/train.py
accelerate launch --config_file accelerate/config_fsdp.yaml accelerate/train.py

Without a GPU the same commands train a smaller model on CPU ranks, in float32 where the config says fp16.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import accelerate
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader

from shardwise.base.errors import ShardwiseError
from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.models.catalogue import shape_of
from shardwise.models.data.source import image_splits
from shardwise.models.make import build_model
from shardwise.models.shapes import ViTShape

# What runs on CPU ranks for a value of a config: Accelerate has no float16 there.
ON_CPU = {"fp16": "no", "MULTI_GPU": "MULTI_CPU"}
# Whose memory is recorded on a CPU: the second is the first that holds gradients and the optimizer's state at once.
RECORDED_STEPS, RECORDED = 2, "recorded"
SIZES = ("digits", "tiny", "small", "base", "large", "huge")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a Vision Transformer with Accelerate.")
    parser.add_argument("--model-size", choices=SIZES, help="default: tiny, or digits where there is no GPU")
    parser.add_argument("--dataset", default="digits", help="digits, random or images:DIR (a folder a class)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step, for each process")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="stop after so many steps, whatever the epochs")
    parser.add_argument("--warmup-steps", type=int, default=3, help="first steps that samples/s leaves out")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data, for each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-eval", action="store_true")
    parser.add_argument("--config", type=Path, help="the config to check against, where torchrun starts this")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the result")
    args = parser.parse_args()
    if args.config and not args.config.is_file():
        parser.error(f"--config {args.config}: there is no such file")
    return args


def stop(message: str) -> NoReturn:
    """End with exit code 2; of a machine's ranks the first says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(30)  # The launcher ends all ranks as soon as one has ended: let the line come out first.
    sys.exit(2)


def asked_for(config: Path | None) -> dict[str, Any]:
    """What the config asks for, by the config's own keys.

    `accelerate launch` does not hand on its config, but exports what it read, changed by its own options:
    ACCELERATE_USE_FSDP, FSDP_VERSION and, through torchrun, WORLD_SIZE. Where it starts one process of
    several it exports a MASTER_ADDR alone. Plain torchrun reads no config, so there `--config` names one.
    """
    if config:
        found = yaml.safe_load(config.read_text())
        keys = ("num_processes", "distributed_type", "mixed_precision")
        version = {key: value for key, value in found.get("fsdp_config", {}).items() if key == "fsdp_version"}
        return {key: found[key] for key in keys} | version
    lone = "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    asked: dict[str, Any] = {"num_processes": int(os.environ.get("WORLD_SIZE", 2 if lone else 1))}
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        asked |= {"distributed_type": "FSDP", "fsdp_version": int(os.environ.get("FSDP_VERSION", "1"))}
    return asked


def has_gpu() -> bool:
    """Whether there is a device that Accelerate gives to each of several processes; Apple's it does not."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def accelerator_on_cpu(*, with_fsdp: bool) -> Accelerator:
    """An Accelerator on CPU ranks that talk over Gloo.

    Accelerate has FSDP on GPUs only, and takes DDP here without reporting it. torch's FSDP, both versions, runs on
    CPUs, so the state is set to what Accelerate sets on GPUs.
    """
    # The launcher's default, which loads weights on rank 0 and sends them to the others, needs a GPU. All ranks make
    # the same weights from the seed. FSDP of version 1 takes the device `cpu`, and not Accelerate's `cpu:0`.
    loading = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_SYNC_MODULE_STATES": "false"}
    os.environ |= {**loading, "ACCELERATE_TORCH_DEVICE": "cpu"}
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    accelerator = Accelerator(cpu=True, mixed_precision=ON_CPU.get(precision, precision))
    if with_fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def start_accelerator(config: Path | None) -> Accelerator:
    """An Accelerator that runs what its config asks for; otherwise the end."""
    asked, on_cpu = asked_for(config), not has_gpu()
    with_fsdp = asked.get("distributed_type") == "FSDP" and not config  # torchrun hands on no key of the file.
    accelerator = accelerator_on_cpu(with_fsdp=with_fsdp) if on_cpu else Accelerator()
    runs = {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "fsdp_version": 2 if accelerator.is_fsdp2 else 1,
    }
    for key, value in asked.items():
        if runs[key] != (ON_CPU.get(value, value) if on_cpu else value):
            file = config or f"accelerate/config_{'fsdp' if with_fsdp else 'ddp'}.yaml"
            stop(
                f"the config asks for {key} {value}, Accelerate runs {runs[key]}: "
                f"start it with accelerate launch --config_file {file} accelerate/train.py"
            )
    return accelerator


class Memory:
    """This rank's bytes: on a GPU allocated at named points and the peak of each phase of a step, on a CPU one peak.

    The GPU's allocator counts on the host, so reading it does not wait for the GPU. On a CPU the profiler records
    the tensors, as in `shardwise bench`. That slows the steps, so it ends before those that are timed.
    """

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self.on_gpu = device.type == "cuda"
        self.allocated_bytes: dict[str, int] = {}
        self.peak_bytes: dict[str, int] = {}
        self.peak_reserved_bytes = 0
        self.live = LiveBytes() if device.type == "cpu" and warmup_steps > RECORDED_STEPS else None
        self.recording = ExitStack()

    def __enter__(self) -> Self:
        if self.live:
            self.recording.enter_context(self.live)
            self.recording.enter_context(self.live.phase(RECORDED))
        return self

    def __exit__(self, *error: object) -> None:
        if self.live and not self.peak_bytes:
            self.recording.close()
            self.peak_bytes[RECORDED] = self.live.peak_bytes(RECORDED)

    def end_step(self, number: int) -> None:
        if number == RECORDED_STEPS:
            self.__exit__()

    def note(self, point: str) -> None:
        if self.on_gpu:
            self.allocated_bytes.setdefault(point, torch.cuda.memory_allocated())

    def end_phase(self, phase: str) -> None:
        if self.on_gpu:
            self.peak_bytes[phase] = max(self.peak_bytes.get(phase, 0), torch.cuda.max_memory_allocated())
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()


def synchronized_seconds() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(
    model: nn.Module,
    *,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    memory: Memory,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The training loop. A step's loss is the mean over the ranks; samples/s counts all ranks."""
    losses: list[float] = []
    step = num_skipped = 0
    start_seconds = None
    for epoch in range(args.epochs):
        model.train()
        rank_losses = []
        for images, labels in loader:
            if step == args.warmup_steps:
                start_seconds = synchronized_seconds()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images).float(), labels)  # FSDP2 gives logits in float16.
            memory.end_phase("forward")
            accelerator.backward(loss)
            memory.end_phase("backward")
            memory.note("after_first_backward")
            optimizer.step()
            memory.end_phase("step")
            if accelerator.optimizer_step_was_skipped:  # Its float16 gradients overflowed.
                num_skipped += 1
            else:
                memory.note("after_first_step")
            rank_losses.append(loss.detach())
            step += 1
            memory.end_step(step)
            if step == args.max_steps:
                break
        if not rank_losses:
            stop(f"the dataset holds fewer than {args.batch_size} samples for each process")
        losses += accelerator.reduce(torch.stack(rank_losses), reduction="mean").tolist()
        accelerator.print(f"epoch {epoch + 1}: {step} steps, loss {losses[-1]:.4f}")
        if step == args.max_steps:
            break
    num_samples = (step - args.warmup_steps) * args.batch_size * accelerator.num_processes
    speed = num_samples / (synchronized_seconds() - start_seconds) if start_seconds else None
    return {"losses": losses, "samples_per_s": speed, "skipped_steps": num_skipped}


@torch.no_grad()
def accuracy(model: nn.Module, *, accelerator: Accelerator, loader: DataLoader) -> float:
    model.eval()
    num_right = num_samples = 0
    for images, labels in loader:
        guesses, truths = accelerator.gather_for_metrics((model(images).argmax(-1), labels))
        num_right += int((guesses == truths).sum())
        num_samples += len(truths)
    return num_right / num_samples


def rank_report(model: nn.Module, *, accelerator: Accelerator, memory: Memory) -> dict[str, Any]:
    """What each rank knows alone: its device, its memory and, unless they are sharded, its weights."""
    sha256 = hashlib.sha256()
    if not (sharded := accelerator.distributed_type == DistributedType.FSDP):
        for parameter in model.parameters():
            sha256.update(parameter.detach().cpu().numpy().tobytes())
    return {
        "rank": accelerator.process_index,
        "device": torch.cuda.get_device_name() if memory.on_gpu else accelerator.device.type,
        "peak_allocated_bytes": max(memory.peak_bytes.values(), default=None),
        "peak_reserved_bytes": memory.peak_reserved_bytes or None,
        "peak_by_phase_bytes": memory.peak_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "weights_sha256": None if sharded else sha256.hexdigest(),
    }


def loaders(shape: ViTShape, *, args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Training and evaluation data; Accelerate will hand each process its own batches."""
    try:
        splits = image_splits(
            args.dataset,
            image_size=shape.image_size,
            num_channels=shape.num_channels,
            num_classes=shape.num_classes,
        )
    except ShardwiseError as error:
        stop(str(error))
    options = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    training = DataLoader(splits.training, shuffle=True, drop_last=True, **options)
    return training, DataLoader(splits.evaluation, **options)


def report(result: dict[str, Any], *, json_file: Path | None) -> None:
    """Print what was measured; write all of it where --json says."""
    on_cpu = result["ranks"][0]["device"] == "cpu"
    if result["samples_per_s"]:
        print(f"samples/s {result['samples_per_s']:.1f}{' (of a CPU: not a speed claim)' if on_cpu else ''}")
    if "accuracy" in result:
        print(f"accuracy {result['accuracy']:.4f}")
    for rank in result["ranks"]:
        if not (peak := rank["peak_allocated_bytes"]):
            measured = f"not measured: needs --warmup-steps {RECORDED_STEPS + 1}" if on_cpu else "not measured"
        else:
            measured = f"{bytes_text(peak)} of tensors" if on_cpu else f"{peak / 2**30:.2f} GiB allocated"
        print(f"peak of rank {rank['rank']}: {measured}")
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    args = parse_arguments()
    accelerator = start_accelerator(args.config)
    set_seed(args.seed)
    model_size = args.model_size or ("tiny" if has_gpu() else "digits")
    shape = shape_of(f"vit-{model_size}")
    assert isinstance(shape, ViTShape)
    if args.dataset == "digits":
        shape = replace(shape, image_size=8, patch_size=2, num_channels=1, num_classes=10)
    result: dict[str, Any] = {
        "model": f"vit-{model_size}",
        "num_params": shape.num_params,
        "dataset": args.dataset,
        "batch_size": args.batch_size,
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        # Accelerate has no float16 on CPUs and takes float32 without reporting it.
        "mixed_precision": accelerator.mixed_precision if accelerator.native_amp else "no",
        "versions": {"torch": torch.__version__, "accelerate": accelerate.__version__},
    }
    if not has_gpu():
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION")
        instead = f", float32 in place of {asked}" if asked in ON_CPU else ""
        accelerator.print(f"no GPU here: {result['model']} on {accelerator.num_processes} CPU ranks with Gloo{instead}")
    training, evaluation = loaders(shape, args=args)
    with Memory(accelerator.device, warmup_steps=args.warmup_steps) as memory:
        model = build_model(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)
        memory.end_phase("prepare")
        memory.note("after_prepare")
        result |= train(model, accelerator=accelerator, optimizer=optimizer, loader=training, memory=memory, args=args)
    if not args.skip_eval:
        result["accuracy"] = accuracy(model, accelerator=accelerator, loader=evaluation)
    result["ranks"] = gather_object([rank_report(model, accelerator=accelerator, memory=memory)])
    if accelerator.is_main_process:
        report(result, json_file=args.json)
    accelerator.wait_for_everyone()  # A rank that has left takes its connections along.
    accelerator.end_training()


if __name__ == "__main__":
    main()
