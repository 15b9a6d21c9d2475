"""What tests on a GPU share."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A job of one NCCL rank, in this process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()
