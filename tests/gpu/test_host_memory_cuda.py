"""On a GPU: states in host memory pass through the device while it computes, and give the same bits as on the device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise
from shardwise import Plan
from shardwise.engine.optimizer import streamed_update
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = GPTShape(num_layers=6, width=1024, num_heads=8, vocab_size=2048, max_seq=256)
NUM_STEPS = 8


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # So that a part is cut, and slots are used again while copies run.
    monkeypatch.setattr(streamed_update, "CHUNK_ELEMENTS", 3_000_000)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29612", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SHAPE.vocab_size, (4, SHAPE.max_seq), generator=generator).cuda()


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, **{"fused": True, **options})


def train(
    plan: Plan,
    *,
    make: Callable[..., torch.optim.Optimizer] = adamw,
    passes: int = 1,
    to_none: bool = True,
    **more: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model(SHAPE, device="cuda")
    model, optimizer = shardwise.prepare(model, make(model.parameters()), plan)
    averages = shardwise.EMA(model, decay=0.9) if more.get("ema") else None
    losses = []
    for step in range(NUM_STEPS):
        for number in range(passes):
            with shardwise.accumulate(model, enabled=number < passes - 1):
                loss = model(tokens(passes * step + number)).float().logsumexp(-1).mean()
                loss.backward()
        if more.get("clip"):
            shardwise.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        if averages is not None:
            averages.update()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **shardwise.full_state_dict(model, optimizer)["model"]}


LOOPS: dict[str, dict[str, Any]] = {
    "fused": {},
    "foreach": {"make": lambda params: adamw(params, fused=False, foreach=True)},
    "capturable": {"make": lambda params: adamw(params, fused=False, capturable=True)},
    "sgd": {"make": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)},
    "accumulated, clipped": {"passes": 2, "clip": True},
    "gradients set to zero": {"to_none": False},
    "averages": {"ema": True},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("states", [True, ("blocks.3", "blocks.4", "(root)")], ids=["all", "some"])
def test_states_in_host_memory_are_updated_as_on_the_device(loop: str, states: Any) -> None:
    usual = {"strategy": "fsdp", "precision": "bf16", "recompute": "full"}
    expected = train(Plan(**usual), **LOOPS[loop])
    found = train(Plan(**usual, offload_states=states), **LOOPS[loop])
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "plan", [{"strategy": "zero2"}, {"offload_activations": ["blocks.*"]}, {"capture": "off"}], ids=str
)
def test_other_plans_give_the_same_bits(plan: dict[str, Any]) -> None:
    expected = train(Plan(precision="bf16"))
    found = train(Plan(**{"precision": "bf16", "offload_states": True, **plan}))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_pinned_memory_has_the_size_that_was_asked_for() -> None:
    from shardwise.engine.offload.pinned import PinnedPool, pinned_zeros

    memory = pinned_zeros(3 * 2**20 + 4096)
    assert memory.is_pinned()
    assert memory.nbytes == 3 * 2**20 + 4096
    assert not memory.any()
    pool, source = PinnedPool(), torch.ones(1000, 300, device="cuda")
    first = pool.empty_like(source)
    address = first.data_ptr()
    del first
    assert pool.empty_like(source).data_ptr() == address
    assert pool.num_bytes == source.nbytes
