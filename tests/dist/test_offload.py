"""Activations that wait in host memory change nothing in a training, under every strategy.

On a CPU "host memory" is a clone; what is copied, when and whether it is awaited is tested in tests/unit/engine.
"""

import pytest
from cases import MODELS, adamw
from ranks import run_ranks
from training import Case, assert_equal, on_ranks, one_process
from whole import in_turn, strategies

from shardwise.plan import Plan


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_offloaded_activations_train_bit_equal_to_one_process(strategy: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=3)
    plan = Plan(strategy=strategy, offload_activations=True)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))


@pytest.mark.parametrize(
    ("model", "recompute"), in_turn(["llama", "resnet"], "selective", "full", every=("full", "selective"))
)
def test_recomputation_and_offload_go_together(model: str, recompute: str) -> None:
    case = Case(make=MODELS[model], optimizer=adamw, num_steps=3)
    units = "auto + blocks.1.attention" if model == "llama" else "auto"
    plan = Plan(strategy="fsdp", units=units, recompute=recompute, offload_activations=True)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, True)), one_process(case, num_ranks=2))
