"""Every strategy trains as one process does, on every family of models; also when collectives are as late as can be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from training import Batch, Case, assert_close, assert_equal, on_ranks, one_process

from shardwise.mesh import Mesh
from shardwise.models.build import build_model
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, ViTShape
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan

# Widths that divide by nothing, so that slices cut through parameters.
GPT = GPTShape(num_layers=3, width=18, num_heads=3, vocab_size=31, max_seq=8)
LLAMA = LlamaShape(num_layers=3, width=24, num_heads=4, num_kv_heads=2, ffn_width=37, vocab_size=29, max_seq=8)
VIT = ViTShape(num_layers=2, width=18, num_heads=3, image_size=8, patch_size=4, num_channels=1, num_classes=7)
RESNET = ResNetShape(
    block="basic", num_blocks=(1, 1, 1, 1), width=3, image_size=8, num_channels=1, num_classes=5, small_images=True
)


def make_tokens(shape: Any) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(shape.vocab_size, (2, shape.max_seq + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return build_model(shape), batch


def make_images(shape: Any) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        images = torch.randn(3, shape.num_channels, shape.image_size, shape.image_size, generator=generator)
        return images, torch.randint(shape.num_classes, (3,), generator=generator)

    return build_model(shape), batch


MODELS = {
    "gpt": partial(make_tokens, GPT),
    "llama": partial(make_tokens, LLAMA),
    "vit": partial(make_images, VIT),
    "resnet": partial(make_images, RESNET),
}
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=1e-1, momentum=0.9)


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_are_bit_equal_to_one_process(model: str, strategy: str, late: bool) -> None:
    case = Case(make=MODELS[model], optimizer=adamw)
    plan = Plan(strategy=strategy, bucket_bytes=4000)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, late)), one_process(case, num_ranks=2))


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_agree_with_one_process_to_rounding(strategy: str, num_ranks: int, late: bool) -> None:
    sgd_case = Case(make=MODELS["gpt"], optimizer=sgd, num_steps=1)
    plan = Plan(strategy=strategy, bucket_bytes=4000)
    assert_close(
        run_ranks(on_ranks, num_ranks=num_ranks, args=(sgd_case, plan, late)),
        one_process(sgd_case, num_ranks=num_ranks),
        tolerance=1e-6,
    )
    adamw_case = Case(make=MODELS["llama"], optimizer=adamw, double=True)
    plan = Plan(strategy=strategy, bucket_bytes=4000, precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=num_ranks, args=(adamw_case, plan, late)),
        one_process(adamw_case, num_ranks=num_ranks),
        tolerance=1e-10,
    )


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("mesh", [Mesh(replicate=4), Mesh(replicate=2, shard=2), Mesh(shard=4)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_on_every_mesh(strategy: str, mesh: Mesh, late: bool) -> None:
    case = Case(make=MODELS["vit"], optimizer=adamw, num_steps=4, double=True)
    plan = Plan(strategy=strategy, mesh=mesh, precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=4, args=(case, plan, late)), one_process(case, num_ranks=4), tolerance=1e-10
    )
