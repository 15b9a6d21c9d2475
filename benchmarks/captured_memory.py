"""The memory of one training of captured_models.py, by step: `python benchmarks/captured_memory.py bert-large auto`.

For each pool of the caching allocator and stream: MiB reserved, and in use between steps. Then the totals and their
peaks so far, and what else is in use on the device. The second word is the plan's `capture`.
"""

import sys
from collections import Counter

import torch
import torch.distributed as dist
from captured_models import mix, training, used_bytes

_SHOWN = (0, 1, 3, 7)


def show(when: str) -> None:
    reserved: Counter[tuple[object, ...]] = Counter()
    in_use: Counter[tuple[object, ...]] = Counter()
    for segment in torch.cuda.memory_snapshot():
        place = (segment["segment_pool_id"], segment["stream"], segment["segment_type"])
        reserved[place] += segment["total_size"]
        in_use[place] += segment["allocated_size"]
    for place, num_bytes in reserved.items():
        print(f"{when}: pool {place}: reserved {num_bytes >> 20}, in use {in_use[place] >> 20}")
    print(
        f"{when}: reserved {torch.cuda.memory_reserved() >> 20}, most {torch.cuda.max_memory_reserved() >> 20}; "
        f"allocated {torch.cuda.memory_allocated() >> 20}, most {torch.cuda.max_memory_allocated() >> 20}; "
        f"else {(used_bytes() - torch.cuda.memory_reserved()) >> 20} MiB",
        flush=True,
    )


def main() -> None:
    name, capture = sys.argv[1:]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    model, step, batch = training(name, capture=capture, backend="none", tell=print)
    show("prepared")
    for number in range(max(_SHOWN) + 1):
        step(*batch)
        torch.cuda.synchronize()
        if number in _SHOWN:
            show(f"step {number}")
    mix(model, step, *batch)
    show("mixed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
