"""`ShardwiseTrainer(plan="auto")`: a plan is solved from its model and first batch, and nothing else changes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from training import line

from shardwise import Plan

preload("transformers.models.llama.modeling_llama", "transformers.trainer")


def make_trainer(folder: str, *, plan: Any, data: Any = None, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from shardwise.integrations import ShardwiseTrainer

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, attention_dropout=0.1, **sizes))
    if data is None:
        data = [{"input_ids": (torch.arange(8) + n) % 32, "labels": (torch.arange(8) + n) % 32} for n in range(16)]
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        max_steps=3,
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        **settings,
    )
    options = {} if plan is None else {"plan": plan}
    return ShardwiseTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, **options)


def chosen(rank: int, folder: str, **settings: Any) -> tuple[dict[str, Any], bool]:
    """The plan that was solved, and whether a run that is given it from the start trains the same."""
    auto = make_trainer(folder, plan="auto", **settings)
    assert auto.plan.is_auto
    auto.train()
    given = make_trainer(folder, plan=auto.plan, **settings)
    given.train()
    states = auto.model.state_dict(), given.model.state_dict()
    return auto.plan.to_dict(), all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.timeout(180)
def test_the_plan_is_solved_for_all_ranks_and_the_batches_stay_those_of_a_run_with_that_plan(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    (first, equal), (second, also_equal) = run_ranks(chosen, num_ranks=2, args=(str(tmp_path),), timeout_seconds=150.0)
    assert first == second
    plan = Plan.from_dict(first)
    assert not plan.is_auto
    assert (plan.micro_batch, plan.accumulate) == (2, 1)
    assert equal
    assert also_equal


def mistakes(rank: int, folder: str) -> list[str]:
    def collate(samples: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)}

    unlike = make_trainer(folder, plan="auto")
    unlike.data_collator = collate
    return [line(unlike.train), line(make_trainer(folder, plan="auto").evaluate)]


@pytest.mark.timeout(180)
def test_what_cannot_be_solved_is_one_line(tmp_path: Path) -> None:
    if find_spec("transformers") is None:
        pytest.skip("needs transformers")
    ((unlike, early),) = run_ranks(mistakes, num_ranks=1, args=(str(tmp_path),), timeout_seconds=150.0)
    assert "the batch's tensors have [1, 2] entries" in unlike
    assert "the plan is not chosen yet; trainer.train() chooses it from the first batch" in early


def without_a_plan(rank: int, folder: str) -> tuple[Plan, bool]:
    """The plan of a trainer that is given none, and whether it trains as one that is given ddp."""
    given = make_trainer(folder, plan="ddp")
    given.train()
    default = make_trainer(folder, plan=None)
    default.train()
    states = given.model.state_dict(), default.model.state_dict()
    return default.plan, all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.timeout(180)
def test_without_a_plan_a_trainer_runs_ddp(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    found = run_ranks(without_a_plan, num_ranks=2, args=(str(tmp_path),), timeout_seconds=150.0)
    assert found == [(Plan(strategy="ddp"), True)] * 2
