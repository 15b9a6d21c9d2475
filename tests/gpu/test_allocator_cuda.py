"""The model of the caching allocator reserves what torch's allocator does, with fixed and with expandable segments."""

import os
import random
import subprocess
import sys

import pytest
import torch

from shardwise.planner.memory.allocator import CachingAllocator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
SIZES = (300_000, 3 * MIB, 9 * MIB + 100, 17 * MIB, 48 * MIB + 7000, 90 * MIB, 130 * MIB)
NUM_CALLS = 3000


def reserved(allocate: object, free: object, reserved_bytes: object) -> list[int]:
    """Reserved bytes after each of the same random requests and releases, at most 40 GiB of them alive."""
    numbers, held, found = random.Random(0), [], []
    for _ in range(NUM_CALLS):
        if held and numbers.random() < 0.48:
            free(held.pop(numbers.randrange(len(held))))
        else:
            held.append(allocate(numbers.choice(SIZES)))
        found.append(reserved_bytes())
    return found


def main() -> None:
    def allocate(num_bytes: int) -> list[torch.Tensor]:
        return [torch.empty(num_bytes, dtype=torch.uint8, device="cuda")]

    for number in reserved(allocate, list.clear, torch.cuda.memory_reserved):
        print(number)


@pytest.mark.parametrize("expands", [False, True])
def test_what_is_reserved_is_modelled_request_by_request(expands: bool) -> None:
    conf = f"expandable_segments:{expands}"
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    measured = [int(line) for line in done.stdout.splitlines()]
    allocator = CachingAllocator(expands=expands)
    modelled = reserved(allocator.allocate, allocator.free, lambda: allocator.reserved_bytes)
    assert len(measured) == NUM_CALLS
    assert modelled[-1] > 2**30
    assert modelled == measured


POOL = """
import torch
from shardwise.engine.graphs.graph_pool import GraphPool

stream = torch.cuda.Stream()
before = torch.empty(2**25, device="cuda")
pool = GraphPool(stream)
with pool.filling():
    inside = torch.empty(2**25, device="cuda")
for one in (torch.cuda.memory_snapshot((0, 0)), torch.cuda.memory_snapshot(pool.id)):
    print(any(segment["is_expandable"] for segment in one))
"""


def test_segments_of_pools_never_expand() -> None:
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", POOL], env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["True", "False"]


if __name__ == "__main__":
    main()
