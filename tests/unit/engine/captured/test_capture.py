"""Where nothing can be captured the step is the step. What a captured one does needs a GPU: tests/gpu."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Plan
from shardwise.comm.job_environment import capture_is_off
from shardwise.engine.captured.capture import _why_not_unasked
from shardwise.engine.graphs.step_pool import why_no_pool
from shardwise.errors import InvalidJob, InvalidModel, InvalidPlan


@pytest.fixture(autouse=True)
def group() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step() -> None: ...


@pytest.mark.parametrize("capture", ["auto", "off"])
@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_without_a_gpu_the_step_is_left_alone_without_a_line(engine: str, capture: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = shardwise.prepare(model, optimizer, Plan(engine=engine, capture=capture))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shardwise.capture(step, prepared, optimizer) is step
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_model_that_was_not_prepared_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InvalidModel, match="shardwise.prepare"):
        shardwise.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_without_a_gpu_a_plan_that_insists_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="only a CUDA device can capture a step"):
        shardwise.prepare(nn.Linear(4, 4), None, Plan(capture="on"))


def test_true_and_false_are_on_and_off_and_auto_is_the_default() -> None:
    assert [Plan(capture=given).capture for given in (True, False, "auto", "on", "off")] == [
        "on", "off", "auto", "on", "off",
    ]  # fmt: skip
    assert Plan().capture == "auto"
    assert Plan(capture=True) == Plan(capture="on") == Plan.from_dict(Plan(capture=True).to_dict())


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"precision": "fp16"}, "with precision = 'fp16' a step waits for the device"),
        ({"dynamic": True}, "with dynamic = true a step waits for the device"),
        (
            {"offload_states": True, "offload_update": "host"},
            "with offload_update = 'host' a step waits for the device",
        ),
        (
            {"offload_states": ["blocks.*"]},
            "units are, so that updates of states in host memory overlap the next forward",
        ),
        ({"update": "backward"}, "update = 'backward': a replay that is undone would have updated"),
        ({"offload_activations": True}, "offload_activations"),
        ({"collectives": "ring"}, "collectives = 'ring'"),
        ({"owned": ("*",)}, "parameters that one rank owns get new memory in each update"),
        ({}, ""),
    ],
)
def test_auto_leaves_alone_what_on_refuses(setting: dict[str, object], why: str) -> None:
    assert Plan(**setting).why_not_captured() == why  # type: ignore[arg-type]


def test_whole_steps_with_units_in_host_memory_are_captured_on_demand() -> None:
    assert Plan(capture="on", offload_states=True, offload_activations=["blocks.*"]).why_not_captured() == ""


def test_compiled_modules_and_hooks_of_the_user_are_captured_on_demand_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert _why_not_unasked(model) == ""
    model[0].register_forward_hook(lambda *_: None)
    assert _why_not_unasked(model).startswith("model.0 has a hook, which a replay would not call")
    model[0].compile(backend="eager")
    assert _why_not_unasked(model).startswith("it has modules that were compiled outside of the plan")


@pytest.mark.parametrize(
    ("backend", "why"), [("native", ""), ("cudaMallocAsync", "torch's allocator is cudaMallocAsync")]
)
def test_only_torchs_own_allocator_has_pools(monkeypatch: pytest.MonkeyPatch, backend: str, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert why_no_pool().startswith(why)
    assert bool(why_no_pool()) is bool(why)


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not capture_is_off()
    monkeypatch.setenv("SHARDWISE_CAPTURE", "off")
    assert capture_is_off()
    monkeypatch.setenv("SHARDWISE_CAPTURE", "no")
    with pytest.raises(InvalidJob, match="SHARDWISE_CAPTURE = 'no': must be off, or not be set"):
        capture_is_off()
