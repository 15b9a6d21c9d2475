"""What each engine can run, and the sentences that refuse the rest."""

from typing import Any

import pytest

from shardwise.base.errors import InvalidPlan
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, lives_alike, strategies_of
from shardwise.plan.placement import STRATEGIES

TORCH = LIMITS["torch"]


def test_our_engine_runs_every_placement_and_torchs_those_that_live_alike() -> None:
    assert strategies_of("shardwise") == tuple(STRATEGIES)
    assert strategies_of("torch") == ("ddp", "shard_grad_op", "fsdp")
    assert [lives_alike(placement) for placement in STRATEGIES.values()] == [True, False, False, True, True]


def test_what_an_engine_can_leave_is_what_a_plan_has_by_default() -> None:
    plain = Plan()
    for limits in LIMITS.values():
        for setting in (*limits.settings, *limits.run_settings):
            assert getattr(plain, setting.key) == setting.plain


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"collectives": "ring"},
            "collectives = 'ring' with engine = 'torch': torch's engine uses collectives = 'backend'",
        ),
        ({"dynamic": True}, "dynamic = true with engine = 'torch': only engine = 'shardwise' can do that"),
        ({"offload_activations": True}, "engine = 'torch' does not offload: set engine = 'shardwise'"),
        ({"offload_states": True}, "engine = 'torch' does not offload: set engine = 'shardwise'"),
    ],
)
def test_what_an_engine_can_do_nothing_with_is_refused_where_the_plan_is_made(
    asked: dict[str, Any], message: str
) -> None:
    Plan(**asked)
    with pytest.raises(InvalidPlan) as caught:
        Plan(engine="torch", **asked)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("asked", "lacks", "way_out"),
    [
        ({"recompute": "full"}, "recompute = 'full'", "torch.utils.checkpoint"),
        ({"recompute_overrides": {"blocks.0": "full"}}, "recompute_overrides", "leave it out"),
        ({"keep_fp32": ("head",)}, "keep_fp32", "leave it out, or set engine = 'shardwise'"),
        ({"accumulate_reduced": True}, "accumulate_reduced", "leave it out"),
        ({"strategy": "zero2"}, "zero2", "use ddp, shard_grad_op or fsdp, or set engine = 'shardwise'"),
        ({"overrides": {"blocks.1": "zero1"}}, "zero1", "(blocks.1): use ddp"),
        ({"overrides": {"blocks.1": "ddp"}}, "mix of replicated and sharded units", "give all units ddp or none"),
        ({"strategy": "ddp", "reduce_dtype": "bf16"}, "reduce_dtype = 'bf16' under ddp", "leave reduce_dtype out"),
        (
            {"precision": "native", "reduce_dtype": "bf16"},
            "reduce_dtype = 'bf16' under precision = 'native'",
            "leave reduce_dtype out",
        ),
    ],
)
def test_a_plan_that_torch_cannot_run_can_be_made_and_is_refused_in_a_few_words_or_a_sentence(
    asked: dict[str, Any], lacks: str, way_out: str
) -> None:
    plan = Plan(engine="torch", **asked)
    refusal = TORCH.why_not(plan)
    assert refusal is not None
    assert refusal.lacks == lacks
    assert refusal.sentence.startswith("engine = 'torch' ")
    assert way_out in refusal.sentence
    assert "\n" not in refusal.sentence


def test_what_torch_can_run_is_not_refused() -> None:
    for strategy in strategies_of("torch"):
        assert TORCH.why_not(Plan(engine="torch", strategy=strategy, precision="bf16")) is None
    assert LIMITS["shardwise"].why_not(Plan(overrides={"blocks.1": "ddp"}, recompute="full")) is None


def test_placements_of_units_count_before_those_that_a_plan_names() -> None:
    plan = Plan(engine="torch", overrides={"*": "ddp"})
    assert TORCH.why_not(plan, placements=plan.placements(["(root)", "blocks.0"])) is None
