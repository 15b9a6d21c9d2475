"""Names of parameters, whatever an engine put around the modules; and whose part of a gradient counts."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.comm.job.absent import absent_group
from shardwise.measure.bench.gradients import parts_of, plain_name


@pytest.mark.parametrize(
    ("name", "known", "plain"),
    [
        ("blocks.0.weight", ["blocks.0.weight"], "blocks.0.weight"),
        ("module.blocks.0.weight", ["blocks.0.weight"], "blocks.0.weight"),
        ("_forward_module.module.head.weight", ["head.weight"], "head.weight"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.weight", ["blocks.0.weight"], "blocks.0.weight"),
        # The model has a module of that name itself.
        ("module.module.weight", ["module.weight"], "module.weight"),
        ("other.weight", ["head.weight"], "other.weight"),
    ],
)
def test_a_parameter_goes_by_the_models_own_name(name: str, known: list[str], plain: str) -> None:
    assert plain_name(name, known=known) == plain


def test_each_part_counts_on_the_first_of_the_ranks_that_hold_it() -> None:
    model = nn.Module()
    # Row 1, column 0 of the grid.
    with absent_group(4, rank=2):
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        model.copied = nn.Parameter(torch.ones(4))
        model.sharded = nn.Parameter(distribute_tensor(torch.ones(4), line, [Shard(0)]))
        model.by_column = nn.Parameter(distribute_tensor(torch.ones(4), grid, [Replicate(), Shard(0)]))
        model.by_row = nn.Parameter(distribute_tensor(torch.ones(4), grid, [Shard(0), Replicate()]))
        parts = parts_of(model, names=["copied", "sharded", "by_column", "by_row"])
    counts = {part.name: part.counts for part in parts}
    assert counts == {"copied": False, "sharded": True, "by_column": False, "by_row": True}
