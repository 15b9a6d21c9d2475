"""What the planner says of a bench's cases."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.base.errors import InvalidCluster, UnknownName
from shardwise.measure.bench.case import cases_of
from shardwise.measure.bench.prediction import cluster_here, forecast_of
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.memory.states import OPTIMIZERS
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_sections import OptimizerSection
from shardwise.training.fitting.memory_advice import optimizer_rule

CONFIG = TrainConfig.from_dict(
    {
        "task": {"model": "gpt2-124m", "seq": 512},
        "plan": {"micro_batch": 4, "precision": "bf16"},
        "train": {"steps": 10},
        "run": {"folder": "nowhere"},
    }
)


def here(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_ranks": 8,
        "device": "cuda",
        "title": "NVIDIA H200",
        "cluster": None,
        "devices": None,
    }
    return cluster_here(**{**values, **changes})


@pytest.mark.parametrize(
    ("section", "device", "rule"),
    [
        ({"name": "adamw"}, "cpu", "adamw-loop"),
        ({"name": "adam"}, "cpu", "adamw-loop"),
        ({"name": "adamw"}, "cuda", "adamw-foreach"),
        ({"name": "adamw", "fused": True}, "cuda", "adamw-fused"),
        ({"name": "adam", "fused": True}, "cpu", "adamw-fused"),
        ({"name": "sgd"}, "cuda", "sgd-plain"),
        ({"name": "sgd", "momentum": 0.9}, "cpu", "sgd"),
    ],
)
def test_the_rule_is_that_of_the_kernels_that_torch_takes(section: dict[str, Any], device: str, rule: str) -> None:
    assert optimizer_rule(OptimizerSection(**section), device=device) == rule
    assert rule in OPTIMIZERS


def test_an_optimizer_without_a_rule_is_one_line() -> None:
    with pytest.raises(UnknownName, match="unknown optimizer of the planner 'radam'; did you mean"):
        optimizer_rule(OptimizerSection(name="radam"), device="cpu")


class TestCluster:
    def test_the_device_is_known_by_what_the_driver_calls_it(self) -> None:
        assert str(here()) == "8xh200"
        assert str(here(title="NVIDIA H100 80GB HBM3", num_ranks=2)) == "2xh100-80gb"

    def test_of_a_device_that_is_in_no_table_no_time_is_predicted(self) -> None:
        forecast = forecast_of(CONFIG, cluster=here(title="Some GPU"), device="cuda")
        found = forecast.of(CONFIG.plan)
        assert found.step_seconds is None
        assert found.spans == ()
        assert found.allocated_bytes > 0
        assert forecast.scaled(CONFIG.plan, strategies=["ddp"]) == []

    def test_what_the_user_says_has_to_be_what_runs(self) -> None:
        assert str(here(cluster="2x4xa100@ib-8x200")) == "2x4xa100-80gb@ib-8x200"
        with pytest.raises(InvalidCluster, match="4xh100 has 4 devices, and the bench 8 ranks"):
            here(cluster="4xh100")
        with pytest.raises(InvalidCluster, match="runs on cpu, and 8xh100 is of h100-80gb"):
            here(cluster="8xh100", device="cpu")


class TestForecast:
    def test_each_strategy_has_memory_time_and_a_timeline(self) -> None:
        forecast = forecast_of(CONFIG, cluster=here(), device="cuda")
        found = {name: forecast.of(replace(CONFIG.plan, strategy=name)) for name in STRATEGIES}
        assert found["fsdp"].allocated_bytes < found["ddp"].allocated_bytes
        for one in found.values():
            assert sum(one.breakdown_bytes.values()) == one.allocated_bytes
            assert max(sum(parts.values()) for _, parts in one.entries) == pytest.approx(one.allocated_bytes, rel=0.02)
            assert one.step_seconds is not None
            assert one.exposed_seconds is not None
            assert one.exposed_seconds < one.step_seconds
            assert {queue for queue, _, _, _ in one.spans} >= {"compute", "reduce"}
            assert all(0 <= start <= end for _, _, start, end in one.spans)

    def test_a_step_that_clips_has_it_in_its_time(self) -> None:
        unclipped = replace(CONFIG, train=replace(CONFIG.train, clip_norm=0.0))
        plan = replace(CONFIG.plan, capture="auto")
        one, other = (forecast_of(c, cluster=here(), device="cuda").of(plan) for c in (CONFIG, unclipped))
        assert "clip" in {name for _, name, _, _ in one.spans}
        assert "clip" not in {name for _, name, _, _ in other.spans}
        assert one.allocated_bytes == other.allocated_bytes

    def test_the_same_training_on_more_devices(self) -> None:
        forecast = forecast_of(CONFIG, cluster=here(), device="cuda")
        rows = forecast.scaled(CONFIG.plan, strategies=["ddp", "fsdp"])
        assert [row.num_ranks for row in rows][:3] == [8, 16, 32]
        assert {row.candidate.batch for row in rows} == {4}


def test_auto_is_a_case_whose_plan_is_chosen_for_the_same_batch() -> None:
    ddp, auto = cases_of(CONFIG, engines=["shardwise"], strategies=["auto", "ddp"])
    assert (auto.strategy, auto.why_not) == ("auto", "")
    plan = forecast_of(CONFIG, cluster=here(), device="cuda").solved(auto.plan)
    assert not plan.is_auto
    assert (plan.micro_batch, plan.accumulate, plan.precision) == (4, 1, "bf16")
    assert ddp.plan.strategy == "ddp"
