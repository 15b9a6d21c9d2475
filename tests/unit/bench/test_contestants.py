"""Which engine can run which case, asked before anything is started."""

from typing import Any

import pytest

from shardwise.bench import contestants
from shardwise.bench.contestants import ENGINES, plan_for, why_not
from shardwise.errors import UnknownName
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.train.config import TrainConfig


def config(*, device: str = "cpu", optimizer: str = "adamw", **plan: Any) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "task": {"model": "gpt-tiny"},
            "plan": {"micro_batch": 1, **plan},
            "train": {"steps": 1},
            "optimizer": {"name": optimizer},
            "run": {"folder": "runs/x", "device": device},
        }
    )


def can_run(engine: str, config: TrainConfig) -> list[str]:
    return [strategy for strategy in STRATEGIES if not why_not(engine, strategy, config)]


def test_who_runs_what_without_a_gpu_and_with_one() -> None:
    theirs = ["ddp", "shard_grad_op", "fsdp"]
    on_cpu = {engine: can_run(engine, config()) for engine in ENGINES}
    assert on_cpu == {
        "shardwise": list(STRATEGIES),
        "captured": [],
        "torch": theirs,
        "accelerate": ["ddp"],
        "lightning": theirs,
    }
    on_gpu = {engine: can_run(engine, config(device="cuda")) for engine in ENGINES}
    assert on_gpu == {**on_cpu, "captured": list(STRATEGIES), "accelerate": theirs}


@pytest.mark.parametrize(
    ("engine", "strategy", "asked", "reason"),
    [
        ("torch", "zero1", {}, "torch has no zero1"),
        ("captured", "ddp", {}, "captured needs a GPU"),
        ("captured", "ddp", {"device": "cuda", "optimizer": "sgd"}, "torch cannot capture the optimizer sgd"),
        ("captured", "ddp", {"device": "cuda", "precision": "fp16"}, "such a step waits for the device"),
        ("torch", "fsdp", {"recompute": "full"}, "torch has no recompute = 'full'"),
        ("torch", "fsdp", {"keep_fp32": ["head"]}, "torch has no keep_fp32"),
        ("torch", "zero2", {"offload_states": True}, "engine = 'torch' does not offload"),
        ("accelerate", "fsdp", {}, "accelerate has FSDP on GPUs only"),
        ("lightning", "ddp", {"precision": "fp16"}, "lightning runs in fp32 and bf16 here, not in fp16"),
        ("lightning", "ddp", {"collectives": "ring"}, "lightning has no collectives"),
        ("lightning", "fsdp", {"overrides": {"blocks.0": "ddp"}}, "lightning has no overrides"),
        ("lightning", "fsdp", {"mesh": {"replicate": 2, "shard": 2}}, "not over a mesh 2×2"),
    ],
)
def test_what_cannot_run_says_why_in_one_line(engine: str, strategy: str, asked: dict[str, Any], reason: str) -> None:
    told = why_not(engine, strategy, config(**asked))
    assert reason in told
    assert "\n" not in told


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    assert why_not("lightning", "ddp", config()) == "lightning is not installed: pip install 'shardwise[peers]'"
    assert why_not("torch", "ddp", config()) == ""


def test_an_engine_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UnknownName, match="unknown engine 'tourch'; did you mean torch"):
        why_not("tourch", "ddp", config())


def test_the_plan_of_a_case_differs_in_strategy_and_engine_alone() -> None:
    plan = Plan(strategy="zero1", micro_batch=3, precision="bf16")
    found = {engine: plan_for(engine, "fsdp", plan) for engine in ENGINES}
    fsdp = Plan(strategy="fsdp", micro_batch=3, precision="bf16", capture="off")
    assert found["shardwise"] == found["accelerate"] == found["lightning"] == fsdp
    assert (found["torch"].engine, found["torch"].capture) == ("torch", "off")
    assert (found["captured"].engine, found["captured"].capture) == ("shardwise", "on")
