"""Which engine can run which case, asked before anything is started."""

from typing import Any

import pytest

from shardwise.base.errors import UnknownName
from shardwise.measure.bench import contestants
from shardwise.measure.bench.contestants import ENGINES, plan_for, why_not
from shardwise.measure.bench.modes import mode_of, without_mode
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.training.config.config import TrainConfig


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


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: object())


@pytest.mark.usefixtures("all_installed")
def test_who_runs_what_without_a_gpu_and_with_one() -> None:
    theirs = ["ddp", "shard_grad_op", "fsdp"]
    on_cpu = {engine: can_run(engine, config()) for engine in ENGINES}
    assert on_cpu == {
        "shardwise": list(STRATEGIES),
        "captured": [],
        "compiled": [],
        "torch": theirs,
        "torch-captured": [],
        "torch-compiled": [],
        "accelerate": ["ddp"],
        "lightning": theirs,
        "megatron-fsdp": [],
        "megatron-fsdp-captured": [],
        "deepspeed": ["zero1", "zero2", "fsdp"],
    }
    on_gpu = {engine: can_run(engine, config(device="cuda")) for engine in ENGINES}
    assert on_gpu == {
        **on_cpu,
        "captured": list(STRATEGIES),
        "compiled": list(STRATEGIES),
        "torch-captured": theirs,
        "torch-compiled": theirs,
        "accelerate": theirs,
        "megatron-fsdp": ["ddp", "zero1", "zero2", "fsdp"],
        "megatron-fsdp-captured": ["ddp", "zero1", "zero2", "fsdp"],
    }


@pytest.mark.parametrize(
    ("engine", "strategy", "asked", "reason"),
    [
        ("torch", "zero1", {}, "torch has no zero1"),
        ("captured", "ddp", {}, "captured needs a GPU"),
        (
            "captured",
            "ddp",
            {"device": "cuda", "offload_activations": True},
            "units of this plan cannot be CUDA graphs",
        ),
        ("torch", "fsdp", {"recompute": "full"}, "torch has no recompute = 'full'"),
        ("torch", "fsdp", {"keep_fp32": ["head"]}, "torch has no keep_fp32"),
        ("torch", "zero2", {"offload_states": True}, "engine = 'torch' does not offload"),
        ("accelerate", "fsdp", {}, "accelerate has FSDP on GPUs only"),
        ("lightning", "ddp", {"precision": "fp16"}, "lightning runs in fp32 and bf16 here, not in fp16"),
        ("lightning", "ddp", {"collectives": "ring"}, "lightning has no collectives"),
        ("lightning", "fsdp", {"overrides": {"blocks.0": "ddp"}}, "lightning has no overrides"),
        ("lightning", "fsdp", {"mesh": {"replicate": 2, "shard": 2}}, "not over a mesh 2×2"),
        ("compiled", "ddp", {}, "compiled needs a GPU"),
        ("torch-captured", "ddp", {}, "torch-captured needs a GPU"),
        ("torch-captured", "ddp", {"device": "cuda", "optimizer": "sgd"}, "torch cannot capture the optimizer sgd"),
        ("torch-captured", "ddp", {"device": "cuda", "precision": "fp16"}, "looks for overflows in each step"),
        ("torch-compiled", "zero1", {"device": "cuda"}, "torch has no zero1"),
        ("megatron-fsdp", "fsdp", {}, "megatron-fsdp needs a GPU"),
        ("megatron-fsdp", "shard_grad_op", {"device": "cuda"}, "megatron-fsdp has no shard_grad_op"),
        ("megatron-fsdp-captured", "fsdp", {"device": "cuda", "keep_fp32": ["head"]}, "megatron-fsdp has no keep_fp32"),
        ("deepspeed", "shard_grad_op", {}, "deepspeed has no shard_grad_op"),
        ("deepspeed", "ddp", {}, "deepspeed has no ddp"),
        ("torch", "fsdp", {"optimizer": "muon"}, "fully_shard gives Muon slices of matrices"),
        ("lightning", "fsdp", {"optimizer": "muon"}, "lightning would give Muon slices of matrices"),
        ("deepspeed", "zero2", {"optimizer": "muon"}, "deepspeed would give Muon slices of matrices"),
        ("torch", "auto", {}, "auto plans are run by shardwise"),
        ("captured", "auto", {"device": "cuda"}, "auto plans are run by shardwise"),
    ],
)
@pytest.mark.usefixtures("all_installed")
def test_what_cannot_run_says_why_in_one_line(engine: str, strategy: str, asked: dict[str, Any], reason: str) -> None:
    told = why_not(engine, strategy, config(**asked))
    assert reason in told
    assert "\n" not in told


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    assert why_not("lightning", "ddp", config()) == "lightning is not installed: pip install 'shardwise[peers]'"
    assert why_not("deepspeed", "ddp", config()) == "deepspeed is not installed: pip install deepspeed"
    for engine in ("megatron-fsdp", "megatron-fsdp-captured"):
        assert why_not(engine, "fsdp", config()) == "megatron_fsdp is not installed: pip install megatron-fsdp"
    assert why_not("torch", "ddp", config()) == ""


def test_an_engine_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UnknownName, match="unknown engine 'tourch'; did you mean torch"):
        why_not("tourch", "ddp", config())


def test_the_plan_of_a_case_differs_in_strategy_and_engine_alone() -> None:
    plan = Plan(strategy="zero1", micro_batch=3, precision="bf16")
    found = {engine: plan_for(engine, "fsdp", plan) for engine in ENGINES}
    fsdp = Plan(strategy="fsdp", micro_batch=3, precision="bf16", capture="off")
    for engine in ("shardwise", "accelerate", "lightning", "megatron-fsdp", "megatron-fsdp-captured", "deepspeed"):
        assert found[engine] == fsdp, engine
    differing = {engine: (plan.engine, plan.compile, plan.capture) for engine, plan in found.items() if plan != fsdp}
    assert differing == {
        "captured": ("shardwise", "none", "auto"),
        "compiled": ("shardwise", "inductor", "auto"),
        "torch": ("torch", "none", "off"),
        # Its plan cannot ask for a capture: it is captured by hand.
        "torch-captured": ("torch", "none", "off"),
        "torch-compiled": ("torch", "inductor", "off"),
    }


def test_the_plans_own_compiler_is_that_of_the_compiled_engines_alone() -> None:
    found = {engine: plan_for(engine, "fsdp", Plan(compile="aot_eager")).compile for engine in ENGINES}
    assert {engine for engine, compiler in found.items() if compiler == "aot_eager"} == {"compiled", "torch-compiled"}
    assert set(found.values()) == {"none", "aot_eager"}


def test_the_end_of_a_name_says_how_steps_run() -> None:
    assert {engine: mode_of(engine) for engine in ENGINES} == {
        "shardwise": "eager",
        "captured": "captured",
        "compiled": "compiled",
        "torch": "eager",
        "torch-captured": "captured",
        "torch-compiled": "compiled",
        "accelerate": "eager",
        "lightning": "eager",
        "megatron-fsdp": "eager",
        "megatron-fsdp-captured": "captured",
        "deepspeed": "eager",
    }
    assert [without_mode(engine) for engine in ("captured", "torch", "torch-compiled", "megatron-fsdp-captured")] == [
        "shardwise", "torch", "torch", "megatron-fsdp",
    ]  # fmt: skip
