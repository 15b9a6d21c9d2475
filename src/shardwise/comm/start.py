"""The process group, if nobody has started one."""

import atexit
import os

import torch
import torch.distributed as dist


def start_process_group(device: torch.device) -> None:
    """Join the job that the environment describes (torchrun's variables), or be a job of one rank."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    atexit.register(_stop)


def local_device() -> torch.device:
    """The device of this rank: its GPU among those of its machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
