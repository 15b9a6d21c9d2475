"""What the planner says of Muon is what a run takes: the state of owned matrices, and the peak of a step."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from given_optimizers import tried_soon
from ranks import run_ranks
from step_memory import alike_ranks, step_bytes
from test_planner_memory import SHAPES, spec_of, task_of
from whole import whole

from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.engines import prepare
from shardwise.models.muon import MuonWithAdamW, split_off_matrices
from shardwise.models.reference import Model
from shardwise.models.tasks import Task, load_task
from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate
from shardwise.planner.memory.peak import job_of
from shardwise.program.units import model_spec

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def muon(model: Any) -> torch.optim.Optimizer:
    """One iteration: more take no more memory, and long on a CPU without bf16."""
    matrices, others = split_off_matrices(model)
    return MuonWithAdamW(matrices, [{"params": others}], lr=1e-3, muon={"ns_steps": 1}, adamw={"foreach": False})


def made(name: str, device: str) -> Task:
    return task_of(name, device=device) if name in SHAPES else load_task(name, seq=16, device=device)


@tried_soon
def state_bytes(rank: int, name: str, num_ranks: int, strategies: list[str]) -> dict[str, int]:
    """Of rank 0, after a step without the others, by strategy."""
    dist.destroy_process_group()
    found = {}
    # Ranks have oneDNN turned off, without which products in bf16 take long.
    with absent_group(num_ranks), torch.backends.mkldnn.flags(enabled=True):
        for strategy in strategies:
            task = made(name, "cpu")
            optimizer = muon(task.model)
            # Nobody is told that matrices are OWNED who has asked for muon.
            with warnings.catch_warnings(action="error"):
                model, _ = prepare(task.model, optimizer, Plan(strategy=strategy), collectives=AbsentCollectives())
            task.loss(model, task.make_batch(1)).backward()
            optimizer.step()
            values = [value for state in optimizer.state.values() for value in state.values()]
            found[strategy] = sum(value.nbytes for value in values)
    return found


@pytest.mark.parametrize(("name", "num_ranks"), [("gpt", 8), *whole(("gpt", 3), ("llama", 8), ("gpt2-124m", 8))])
def test_the_state_of_rank_0_is_predicted_to_the_byte(name: str, num_ranks: int) -> None:
    spec = model_spec(made(name, "meta").model)
    # On a CPU Muon takes long for all matrices of a large model.
    strategies = list(STRATEGIES) if name in SHAPES else ["zero2"]
    (found,) = run_ranks(state_bytes, num_ranks=1, args=(name, num_ranks, strategies))
    for strategy, num_bytes in found.items():
        plan = Plan(strategy=strategy)
        job = job_of(spec, plan=plan, num_ranks=num_ranks, optimizer="muon-loop", device="cpu")
        in_slices = sum(sum(states.moments) * job.short.weights.get(unit, 1) for unit, states in job.states.items())
        assert in_slices + sum(job.owned_moments) == num_bytes, strategy


@tried_soon
def measured(rank: int, name: str, plans: list[Plan], batch: int) -> list[tuple[int, int]]:
    with alike_ranks():
        return [step_bytes(partial(made, name, "cpu"), plan=plan, batch=batch, optimizer=muon) for plan in plans]


def predicted(name: str, plan: Plan, *, batch: int) -> MemoryEstimate:
    spec = spec_of(name, "fp32", "none") if name in SHAPES else Model(name, seq=16, kernels="cpu").spec_for(plan)
    return estimate(spec, plan=plan, num_ranks=2, batch=batch, optimizer="muon-loop", device="cpu")


@pytest.mark.parametrize(
    ("name", "batch", "strategies"),
    [
        *whole(
            ("gpt-tiny", 1, ("fsdp",)), ("gpt-tiny", 1, ("zero1",)), ("gpt", 4, STRATEGIES), ("llama", 4, STRATEGIES)
        ),
    ],
)
def test_the_peak_is_predicted_to_a_hundredth(name: str, batch: int, strategies: tuple[str, ...]) -> None:
    """In backward; with one short sample, in the update, where matrices are whole."""
    plans = [Plan(strategy=strategy) for strategy in strategies]
    found = run_ranks(measured, num_ranks=2, args=(name, plans, batch))[0]
    for plan, (peak, rest) in zip(plans, found, strict=True):
        memory = predicted(name, plan, batch=batch)
        what = (plan.strategy, memory.peak_at, memory.breakdown_bytes, peak)
        assert memory.at_rest_bytes == pytest.approx(rest, rel=0.01), what
        assert memory.allocated_bytes == pytest.approx(peak, rel=0.01), what
        if name == "gpt-tiny":
            assert memory.peak_at == "after step (root)"
