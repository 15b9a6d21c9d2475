"""On a GPU: recomputation and offload give the same bits as neither, and take the memory that they promise."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.activations.offload import ActivationOffload, offload_unit
from shardwise.engine.activations.recompute import recompute_unit
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

SHAPE = GPTShape(num_layers=6, width=512, num_heads=8, vocab_size=512, max_seq=512, dropout=0.1)
BATCH = 8
STREAM_BYTES = BATCH * SHAPE.max_seq * SHAPE.width * 2
WAYS = ["none", "full", "selective", "none offload", "full offload", "selective offload"]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backward of attention adds up in any order otherwise, and also where that is only warned of."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def make(way: str, *, shape: GPTShape = SHAPE) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(shape, device="cuda").bfloat16()
    offload = ActivationOffload(model, device=torch.device("cuda", torch.cuda.current_device()))
    mode, _, offloaded = way.partition(" ")
    for index, block in enumerate(model.blocks):
        if mode != "none":
            recompute_unit(block, mode=mode, pack=offload.pack)
        if offloaded:
            offload_unit(block, name=f"blocks.{index}", offload=offload)
    return model


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.max_seq), generator=generator).cuda()


def train(model: nn.Module, *, num_steps: int) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for step in range(num_steps):
        loss = model(tokens(step)).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_unit_trains_with_the_same_bits_and_attentions_dropout_is_the_forwards(way: str) -> None:
    losses, weights = train(make("none"), num_steps=6)
    # No read back of a loss in between: the CPU runs ahead, and copies overlap with what computes.
    found_losses, found_weights = train(make(way), num_steps=6)
    assert found_losses == losses
    assert all(torch.equal(one, other) for one, other in zip(found_weights, weights, strict=True))


def held_and_peak(way: str) -> tuple[int, int]:
    """Bytes that a forward leaves on the device, and the most of a step, both besides what was there before."""
    model = make(way, shape=replace(SHAPE, dropout=0.0))
    for step in range(3):
        batch = tokens(step)
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch).float().logsumexp(-1).mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return held, peak


def test_each_way_holds_what_it_promises_between_forward_and_backward() -> None:
    held = {way: held_and_peak(way)[0] for way in WAYS}
    layers = SHAPE.num_layers
    # What the root holds is the same for all: logits, the last norm, the embeddings.
    above_full = {way: (num_bytes - held["full"]) / STREAM_BYTES for way, num_bytes in held.items()}
    # Per block besides its input: norm, qkv, attention, residual, norm, up, GELU; or qkv, attention, its output, up.
    assert above_full["none"] == pytest.approx(layers * (1 + 3 + 1 + 1 + 1 + 4 + 4), rel=0.05)
    assert above_full["selective"] == pytest.approx(layers * (3 + 1 + 1 + 4), rel=0.05)
    # All but the last block's are away.
    assert above_full["none offload"] == pytest.approx(15 - (layers - 1), abs=1)
    assert above_full["full offload"] == pytest.approx(-(layers - 1), abs=1)
    assert above_full["selective offload"] == pytest.approx(9 - (layers - 1), abs=1)


def test_the_peak_of_a_step_falls_in_the_order_of_what_is_given_up() -> None:
    peaks = [held_and_peak(way)[1] for way in ("none", "selective", "full", "full offload")]
    assert peaks == sorted(peaks, reverse=True)
    assert held_and_peak("none offload")[1] < peaks[1]
