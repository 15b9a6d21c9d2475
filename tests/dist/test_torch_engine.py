"""Our engine against torch's own DistributedDataParallel and fully_shard, on the same plan.

Bit-equal wherever both add the same numbers in the same order. On 2 ranks they do: a + b has one order, and to
halve before the sum (DDP) or after it (ours, fully_shard) is exact. On a 2×2 mesh sharded gradients are summed
over one axis and then over the other by both. Four ranks in one group are summed in an order that depends on where
an element lies in its buffer, and buffers differ: there the weights agree to rounding.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MODELS, adamw, sgd
from ranks import run_ranks, shut_down
from torch import Tensor, nn
from training import Case, Result, assert_close, build
from whole import whole

from shardwise.base.errors import InvalidModel, InvalidPlan, ShardwiseError
from shardwise.engine.optimizer.known import StaleOptimizer
from shardwise.engine.torch_engine.prepare import AutocastDataParallel
from shardwise.engines import clip_grad_norm_, full_state_dict, load_full_state_dict, prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

GPT = Case(make=MODELS["gpt"], optimizer=sgd, num_steps=5)
RESNET = Case(make=MODELS["resnet"], optimizer=sgd, num_steps=5)
# Buckets smaller than the model, so that there are several.
DDP = Plan(strategy="ddp", bucket_bytes=4000)
MIXED = Plan(overrides={"blocks.1": "shard_grad_op"})


@pytest.fixture(autouse=True)
def _fresh_ranks() -> None:
    """torch 2.11 remembers the process groups of a mesh by name, and the pool destroys them after a body."""
    shut_down()


def started(rank: int, case: Case, plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Tensor]]:
    """A prepared model, its optimizer, and a function that trains one step and gives the loss."""
    model, batch = build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # so that only rank 0's values can give the right result
    model, optimizer = prepare(model, case.optimizer(model.parameters()), plan)

    def step(number: int) -> Tensor:
        loss = case.loss(model, batch(number, rank))
        loss.backward()
        if case.max_norm is not None:
            clip_grad_norm_(model, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def train(rank: int, case: Case, plan: Plan) -> Result:
    model, _, step = started(rank, case, plan)
    losses = [[step(number).item()] for number in range(case.num_steps)]
    weights = full_state_dict(model)["model"]
    return Result(losses=losses, weights={name: weights[name] for name, _ in build(case)[0].named_parameters()})


def on_both(rank: int, case: Case, plans: list[Plan]) -> list[tuple[Result, Result]]:
    """What each plan gives on our engine and on torch's."""
    return [(train(rank, case, plan), train(rank, case, replace(plan, engine="torch"))) for plan in plans]


def assert_same_bits(ours: Result, torchs: Result) -> None:
    assert ours.losses == torchs.losses
    assert ours.weights.keys() == torchs.weights.keys()
    for name, weight in torchs.weights.items():
        assert torch.equal(ours.weights[name], weight), name


@pytest.mark.parametrize("case", [GPT, *whole(RESNET)], ids=["gpt", "resnet"])
def test_on_two_ranks_every_bit_is_torchs(case: Case) -> None:
    plans = [DDP, Plan(strategy="shard_grad_op"), Plan(strategy="fsdp")]
    plans += [MIXED] if case is GPT else []
    for results in run_ranks(on_both, num_ranks=2, args=(case, plans)):
        for ours, torchs in results:
            assert_same_bits(ours, torchs)


def test_on_a_mesh_of_two_by_two_sharded_strategies_have_torchs_bits_and_ddp_agrees_to_rounding() -> None:
    # One body for all: torch remembers a mesh's process groups, which the pool destroys after a body.
    mesh = Mesh(replicate=2, shard=2)
    plans = [replace(plan, mesh=mesh) for plan in (Plan(strategy="shard_grad_op"), Plan(strategy="fsdp"), DDP)]
    everyone = run_ranks(on_both, num_ranks=4, args=(GPT, plans))
    for *sharded, (ours, torchs) in everyone:
        for pair in sharded:
            assert_same_bits(*pair)
        assert_close([ours], torchs, tolerance=1e-6)


def test_bf16_compute_with_float32_sums_is_bit_equal_to_fully_shard_and_near_to_autocast() -> None:
    sharded, replicated = (Plan(strategy=strategy, precision="bf16") for strategy in ("fsdp", "ddp"))
    for results in run_ranks(on_both, num_ranks=2, args=(GPT, [sharded, replicated])):
        assert_same_bits(*results[0])
        # Autocast keeps norms and the residual stream in float32, so only the loss is comparable.
        for ours, torchs in zip(results[1][0].losses, results[1][1].losses, strict=True):
            assert ours[0] == pytest.approx(torchs[0], rel=0.02)


def clipped_norms(rank: int, plan: Plan) -> tuple[float, float, str]:
    """The norm before and after clipping, and the class of what was returned."""
    model, batch = build(GPT)
    model, _ = prepare(model, None, plan)
    GPT.loss(model, batch(0, rank)).backward()
    norm = clip_grad_norm_(model, 0.1)
    return norm.item(), clip_grad_norm_(model, 0.1).item(), type(norm).__name__


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_clipping_gives_the_norm_of_the_whole_gradient_as_a_plain_tensor(strategy: str) -> None:
    ours = run_ranks(clipped_norms, num_ranks=2, args=(Plan(strategy=strategy),))
    torchs = run_ranks(clipped_norms, num_ranks=2, args=(Plan(strategy=strategy, engine="torch"),))
    for mine, theirs in zip(ours, torchs, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        assert theirs[0] > 0.2
        assert theirs[1] == pytest.approx(0.1, rel=1e-4)
        assert mine[2] == theirs[2] == "Tensor"


def hand_over(rank: int, first: Plan, second: Plan) -> tuple[list[float], list[float], dict[str, Any], list[str]]:
    """Losses of five steps under `first`; of two under `first` and, from its full state, three under `second`."""
    case = replace(GPT, optimizer=adamw)
    model, optimizer, step = started(rank, case, first)
    expected = [step(0).item(), step(1).item()]
    state = full_state_dict(model, optimizer)
    expected += [step(number).item() for number in (2, 3, 4)]
    successor, its_optimizer, its_step = started(rank, case, second)
    load_full_state_dict(successor, its_optimizer, state if rank == 0 else {}, from_rank0=True)
    found = [*expected[:2], *(its_step(number).item() for number in (2, 3, 4))]
    kinds = {name: sorted(values) for name, values in state["optimizer"]["state"].items()}
    return expected, found, kinds, state["optimizer"]["param_groups"][0]["params"]


def test_a_full_state_moves_between_the_engines_and_training_goes_on_as_if_it_had_not() -> None:
    ours, torchs, replicated = Plan(), Plan(engine="torch"), Plan(strategy="ddp", engine="torch")
    kinds = []
    for first, second in ((ours, torchs), (torchs, replicated), (replicated, ours)):
        for expected, found, *kind in run_ranks(hand_over, num_ranks=2, args=(first, second)):
            assert expected == found
            kinds.append(kind)
    assert all(kind == kinds[0] for kind in kinds)


def options_kept(rank: int, plan: Plan) -> tuple[list[tuple[float, int]], bool, str]:
    """(weight decay, number of parameters) of each group; whether they are the model's; the prepared class."""
    with torch.device("meta"):
        model = build_model(
            GPTShape(num_layers=2, width=18, num_heads=3, vocab_size=31, max_seq=8, vocab_multiple=1), device="meta"
        )
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    prepared, optimizer = prepare(model, torch.optim.AdamW(groups), plan)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sizes = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    return sizes, held == set(map(id, prepared.parameters())), type(prepared).__name__


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (Plan(engine="torch"), "FSDPGPT"),
        (Plan(strategy="ddp", engine="torch"), "DistributedDataParallel"),
        (Plan(strategy="ddp", engine="torch", precision="bf16"), AutocastDataParallel.__name__),
    ],
    ids=["fsdp", "ddp", "ddp-bf16"],
)
def test_the_optimizer_keeps_its_groups_and_gets_the_new_parameters_also_from_meta(plan: Plan, kind: str) -> None:
    (result,) = run_ranks(options_kept, num_ranks=1, args=(plan,))
    # 2 embeddings and 4 matrices a block; 8 vectors a block and the last norm's 2.
    assert result == ([(0.5, 10), (0.0, 18)], True, kind)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


def two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def gpt() -> nn.Module:
    return build_model(GPTShape(num_layers=2, width=6, num_heads=3, vocab_size=5, max_seq=4, vocab_multiple=1))


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], type[ShardwiseError], str]] = [
    (gpt, {"strategy": "zero1"}, InvalidPlan, "has no zero1 .*: use ddp, shard_grad_op or fsdp, or set engine"),
    (gpt, {"strategy": "zero2"}, InvalidPlan, "has no zero2 .*: use ddp, shard_grad_op or fsdp, or set engine"),
    (gpt, {"overrides": {"blocks.1": "ddp"}}, InvalidPlan, "mix of .*blocks.1 is ddp, .* is fsdp.*: give all units"),
    (gpt, {"recompute": "full"}, InvalidPlan, "no recompute = 'full': set recompute = 'none'"),
    (gpt, {"recompute_overrides": {"blocks.1": "full"}}, InvalidPlan, "no recompute_overrides: leave it out"),
    (gpt, {"keep_fp32": ("head",)}, InvalidPlan, "no keep_fp32: leave it out, or set engine = 'shardwise'"),
    (gpt, {"accumulate_reduced": True}, InvalidPlan, "no accumulate_reduced: leave it out"),
    (gpt, {"precision": "native", "reduce_dtype": "bf16"}, InvalidPlan, "'native', not in bf16: leave reduce_d"),
    (gpt, {"strategy": "ddp", "reduce_dtype": "fp16"}, InvalidPlan, "under ddp, not in fp16: leave reduce_dtype out"),
    (gpt, {"mesh": Mesh(shard=3)}, InvalidPlan, "mesh 1×3 is 3 ranks, but the job has 1"),
    (gpt, {"units": "auto + head"}, InvalidModel, "embed.weight and head.weight are one parameter.*make head no unit"),
    (Scalar, {}, InvalidModel, r"scale has no dimension .*: give it the shape \(1,\)"),
    (two_dtypes, {"precision": "native"}, InvalidModel, "float32 and float64, .*: cut it by dtype"),
    (frozen, {"strategy": "ddp"}, InvalidModel, "Linear has no trainable parameter"),
]


def refusals(rank: int) -> list[tuple[type[ShardwiseError], str]]:
    found: list[tuple[type[ShardwiseError], str]] = []

    def attempt(model: nn.Module, optimizer: Any, plan: Plan, **options: Any) -> None:
        with pytest.raises(ShardwiseError) as caught:
            prepare(model, optimizer, plan, **options)
        found.append((caught.type, str(caught.value)))

    for make, changes, _, _ in REFUSED:
        attempt(make(), None, replace(Plan(engine="torch"), **changes))
    plan = Plan(engine="torch", strategy="ddp")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    attempt(model, optimizer, plan)
    attempt(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(3, 3).parameters()), plan)
    attempt(prepare(nn.Linear(2, 2), None, plan)[0], None, plan)
    attempt(nn.Linear(2, 2), None, plan, collectives=object())
    with pytest.raises(ShardwiseError) as caught:
        clip_grad_norm_(nn.Linear(2, 2), 1.0)
    found.append((caught.type, str(caught.value)))
    return found


def test_what_torchs_engine_does_not_have_is_refused_in_one_line_with_the_way_out() -> None:
    expected = [(kind, text) for _, _, kind, text in REFUSED]
    expected += [
        (StaleOptimizer, "has stepped before: hand a fresh one to shardwise.prepare"),
        (InvalidPlan, r"shape \(3, 3\) that is not the model's: give it an optimizer of its own"),
        (InvalidModel, "DistributedDataParallel has been through shardwise.prepare already"),
        (InvalidPlan, "has collectives of its own: leave collectives out"),
        (InvalidModel, "this Linear has not been through shardwise.prepare"),
    ]
    (found,) = run_ranks(refusals, num_ranks=1)
    for (kind, text), (found_kind, message) in zip(expected, found, strict=True):
        assert found_kind is kind, message
        assert re.search(text, message), message
        assert "\n" not in message
