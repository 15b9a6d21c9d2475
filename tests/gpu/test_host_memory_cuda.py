"""On a GPU: states in host memory pass through the device while it computes, and give the same bits as on the device."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_cases import gpt_batch, run
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.engine.optimizer import streamed_update
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = GPTShape(num_layers=6, width=1024, num_heads=8, vocab_size=2048, max_seq=256)
NUM_STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """One job for all tests: after about forty that came and went in a process, it crashed, each time elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        yield
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _the_same_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # So that a part is cut, and slots are used again while copies run.
    monkeypatch.setattr(streamed_update, "CHUNK_ELEMENTS", 3_000_000)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SHAPE.vocab_size, (4, SHAPE.max_seq), generator=generator).cuda()


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 1e-3, "fused": True, **options})


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
        if more.get("schedule"):
            # On the device, while the update of the last step may still be in flight.
            for group in optimizer.param_groups:
                group["lr"].fill_(1e-3 / (1 + step))
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
    "a schedule on the device": {
        "make": lambda params: adamw(params, lr=torch.tensor(1e-3, device="cuda"), capturable=True),
        "schedule": True,
    },
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


SOME = ("blocks.3", "blocks.4", "(root)")


@pytest.mark.parametrize("states", [False, True, SOME], ids=["on the device", "all", "some"])
@pytest.mark.parametrize("loop", ["fused", "foreach", "sgd", "a schedule on the device"])
def test_updates_inside_backward_give_the_same_bits(loop: str, states: Any) -> None:
    usual = {"strategy": "fsdp", "precision": "bf16", "recompute": "full"}
    expected = train(Plan(**usual), **LOOPS[loop])
    found = train(Plan(**usual, offload_states=states, update="backward"), **LOOPS[loop])
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def peak_bytes(plan: Plan) -> tuple[int, int]:
    """Return the most that was allocated from the third step on, and the bytes of all gradients."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = build_model(replace(SHAPE, num_layers=12), device="cuda")
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    for step in range(4):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        model(tokens(step)).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, num_bytes


@pytest.mark.parametrize("states", [False, True], ids=["on the device", "in host memory"])
def test_updates_inside_backward_need_no_full_set_of_gradients(states: bool) -> None:
    usual = {"precision": "bf16", "recompute": "full", "capture": "off", "offload_states": states}
    (at_the_end, grads), (inside, _) = (peak_bytes(Plan(**usual, update=update)) for update in ("step", "backward"))
    # Gradients of a few of the twelve blocks exist at once.
    assert inside < at_the_end - grads // 3


# Steps as graphs. The first replay is compared, and so is the tenth: both are ordinary steps.

HOST: dict[str, dict[str, Any]] = {
    "states": {"offload_states": True},
    "states of a unit": {"offload_states": ["blocks.1"]},
    "replicated parameters": {"strategy": "zero2", "offload_states": True},
    "recomputed": {"offload_states": True, "recompute": "full"},
}


def schedule(model: nn.Module, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(1e-3 / (1 + step))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("host", HOST)
def test_units_are_graphs_where_states_live_in_host_memory(
    host: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_update, "CHUNK_ELEMENTS", 30_000)
    usual = {"strategy": "fsdp", "precision": "bf16"}
    options: dict[str, Any] = {"steps": 18, "passes": passes, "between": schedule}
    expected = run(Plan(**usual, capture="off"), **options)
    found = run(Plan(**{**usual, **HOST[host]}), **options)
    assert found.num_replayed > 0
    assert found.same_as(expected)


def test_values_are_read_and_plans_changed_between_replays() -> None:
    read: list[Tensor] = []

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 7:
            # Right after a replay, whose update may still be writing host memory.
            state = shardwise.full_state_dict(model, optimizer)["model"]
            read.append(torch.cat([value.flatten().float() for value in state.values()]))
        elif step == 9:
            with torch.no_grad():
                read.append(model(gpt_batch(99)[0]).float().sum())
        elif step in (11, 17):
            plan = usual if step == 11 else changed
            shardwise.replan(model, Plan(**plan, capture=capture))

    usual = {"strategy": "fsdp", "precision": "bf16"}
    changed = {**usual, "offload_states": ["blocks.0"]}
    capture = "off"
    expected, seen = run(Plan(**usual, capture="off"), steps=24, between=between), list(read)
    capture = "auto"
    read.clear()
    found = run(Plan(**usual, offload_states=True), steps=24, between=between)
    assert found.num_replayed > 0
    assert found.same_as(expected)
    assert all(torch.equal(one, other) for one, other in zip(read, seen, strict=True))


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
