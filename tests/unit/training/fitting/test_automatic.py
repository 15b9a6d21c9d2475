"""`Plan.auto` of your own model: it is traced, and the plan that comes back can be run."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import InvalidPlan
from shardwise.models.tasks import Task
from shardwise.plan import Plan
from shardwise.planner.search.request import NoPlanFits
from shardwise.training.fitting.automatic import job_cluster, smaller_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        out: torch.Tensor = self.down(hidden)
        return x + out


def task() -> Task:
    model = nn.Sequential(*(Block() for _ in range(4)))
    return Task(model=model, loss=lambda m, b: m(b).square().mean(), make_batch=lambda size: torch.ones(size, 64))


def test_a_model_of_ones_own_is_traced_and_planned_for_a_cluster() -> None:
    plan = Plan.auto(task(), plan=Plan(precision="bf16"), cluster="8xh100-80gb", global_batch=64)
    assert plan.micro_batch is not None
    assert plan.micro_batch * plan.accumulate * 8 == 64
    assert not plan.is_auto
    assert plan.placements(["(root)", "0", "1", "2", "3"])


def test_without_a_cluster_it_is_this_jobs_devices() -> None:
    cluster = job_cluster(torch.device("cpu"), num_ranks=3)
    assert (cluster.device.name, cluster.num_ranks) == ("cpu", 3)
    assert Plan.auto(task(), plan=Plan(micro_batch=2), cluster=cluster).micro_batch == 2


def test_a_model_without_a_loss_is_refused_with_what_to_give() -> None:
    with pytest.raises(
        InvalidPlan, match=r"needs a loss and a batch to trace this Sequential: give it shardwise\.Task"
    ):
        Plan.auto(nn.Sequential(Block()), cluster="8xh100-80gb")


def test_a_plan_that_ran_out_of_memory_is_followed_by_a_smaller_one_until_there_is_none() -> None:
    plans = [Plan(strategy="ddp", micro_batch=2)]
    with pytest.raises(NoPlanFits, match="no plan with the same samples per step needs less memory"):
        while len(plans) < 20:
            plans.append(smaller_plan(task(), plans[-1], cluster="2xcpu"))
    assert len(plans) > 2
    assert {plan.micro_batch * plan.accumulate for plan in plans if plan.micro_batch} == {2}
    assert {plan.precision for plan in plans} == {plans[0].precision}


def test_a_smaller_plan_needs_the_plan_that_ran_out() -> None:
    with pytest.raises(InvalidPlan, match="with its strategy and its micro_batch"):
        smaller_plan(task(), Plan(strategy="ddp"))
