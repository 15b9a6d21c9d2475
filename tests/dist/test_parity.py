"""Every strategy trains as one process does, on every family of models; also when collectives are as late as can be."""

from itertools import product

import pytest
from cases import MODELS, adamw, sgd
from ranks import run_ranks
from training import Case, assert_close, assert_equal, on_ranks, one_process
from whole import strategies, whole

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh

OTHERS = [name for name in MODELS if name != "gpt"]


@pytest.mark.parametrize(
    ("model", "strategy", "late"),
    [
        *(("gpt", strategy, True) for strategy in STRATEGIES),
        *((name, strategy, True) for name in OTHERS for strategy in ("zero2", "fsdp")),
        ("gpt", "fsdp", False),
        *whole(*((name, strategy, True) for name in OTHERS for strategy in ("ddp", "zero1", "shard_grad_op"))),
        *whole(
            *(
                (name, strategy, False)
                for name, strategy in product(MODELS, STRATEGIES)
                if (name, strategy) != ("gpt", "fsdp")
            )
        ),
    ],
)
def test_two_ranks_are_bit_equal_to_one_process(model: str, strategy: str, late: bool) -> None:
    case = Case(make=MODELS[model], optimizer=adamw)
    plan = Plan(strategy=strategy, bucket_bytes=4000)
    assert_equal(run_ranks(on_ranks, num_ranks=2, args=(case, plan, late)), one_process(case, num_ranks=2))


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "late"),
    [
        *(("zero1", 3, True), ("fsdp", 3, True), ("zero2", 4, True)),
        *whole(("ddp", 3, True), ("zero2", 3, True), ("shard_grad_op", 3, True)),
        *whole(*((strategy, 4, True) for strategy in STRATEGIES if strategy != "zero2")),
        *whole(*((strategy, 4, False) for strategy in STRATEGIES)),
    ],
)
def test_more_ranks_agree_with_one_process_to_rounding(strategy: str, num_ranks: int, late: bool) -> None:
    sgd_case = Case(make=MODELS["gpt"], optimizer=sgd, num_steps=1)
    plan = Plan(strategy=strategy, bucket_bytes=4000)
    assert_close(
        run_ranks(on_ranks, num_ranks=num_ranks, args=(sgd_case, plan, late)),
        one_process(sgd_case, num_ranks=num_ranks),
        tolerance=1e-6,
    )
    adamw_case = Case(make=MODELS["llama"], optimizer=adamw, double=True)
    plan = Plan(strategy=strategy, bucket_bytes=4000, precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=num_ranks, args=(adamw_case, plan, late)),
        one_process(adamw_case, num_ranks=num_ranks),
        tolerance=1e-10,
    )


@pytest.mark.parametrize("mesh", [Mesh(replicate=2, shard=2), *whole(Mesh(replicate=4), Mesh(shard=4))], ids=str)
@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_every_strategy_runs_on_every_mesh(strategy: str, mesh: Mesh) -> None:
    case = Case(make=MODELS["vit"], optimizer=adamw, num_steps=4, double=True)
    plan = Plan(strategy=strategy, mesh=mesh, precision="native")
    assert_close(
        run_ranks(on_ranks, num_ranks=4, args=(case, plan, True)), one_process(case, num_ranks=4), tolerance=1e-10
    )
