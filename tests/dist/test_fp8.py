"""fp8: every strategy computes what one process computes with reference casts, bit by bit."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import adamw, make_tokens, sgd
from ranks import run_ranks
from simulated_graphs import simulated
from torch import Tensor, nn
from training import Case, build, line, on_ranks

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.doors.integrations.asked_plan import asked_plan
from shardwise.engine.engine import engine_of
from shardwise.engine.fp8.linear import Fp8Linear
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.program import Kind

SHAPES = {
    "gpt": GPTShape(num_layers=3, width=32, num_heads=4, vocab_size=31, max_seq=8, vocab_multiple=1),
    "llama": LlamaShape(
        num_layers=3, width=48, num_heads=3, num_kv_heads=1, ffn_width=80, vocab_size=29, max_seq=9, vocab_multiple=1
    ),
}
NUM_STEPS = 3


def case_of(model: str, optimizer: Any = adamw) -> Case:
    return Case(make=partial(make_tokens, SHAPES[model]), optimizer=optimizer, num_steps=NUM_STEPS)


def plan_of(strategy: str, recipe: str = "tensorwise", **others: Any) -> Plan:
    return Plan(strategy=strategy, precision="fp8", fp8_recipe=recipe, fp8_min_features=16, **others)


# One process, written as plainly as possible


def rounded(values: Tensor, *, dim: int | None, dtype: torch.dtype) -> Tensor:
    """Return what is left of values in fp8, with the largest power of two as scale that lets them fit."""
    values = values.detach().double()
    largest = values.abs().amax() if dim is None else values.abs().amax(dim=dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest.clamp(min=1e-30))))
    return ((values * scale).float().to(dtype).double() / scale).float()


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = 1 if recipe == "rowwise" else None
        a, b = (rounded(one, dim=rows, dtype=torch.float8_e4m3fn) for one in (x, weight))
        return (a @ b.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, columns = (1, 0) if ctx.recipe == "rowwise" else (None, None)
        e4m3 = torch.float8_e4m3fn
        narrow = e4m3 if ctx.recipe == "rowwise" else torch.float8_e5m2
        grad_x = rounded(grad, dim=rows, dtype=narrow) @ rounded(weight, dim=columns, dtype=e4m3)
        # Rows of zeros up to a multiple of 16, as the hardware wants them; they change how a CPU adds up.
        pad = partial(nn.functional.pad, pad=(0, 0, 0, -len(grad) % 16))
        grad_weight = pad(rounded(grad, dim=columns, dtype=narrow)).t() @ pad(rounded(x, dim=columns, dtype=e4m3))
        return grad_x.to(grad.dtype), grad_weight.to(grad.dtype), None


def computes_in_fp8(module: nn.Linear, recipe: str) -> None:
    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, module.in_features)
        output = Reference.apply(flat, module.weight, recipe).view(*x.shape[:-1], module.out_features)
        return output if module.bias is None else output + module.bias

    module.forward = forward  # type: ignore[method-assign]


def one_process(rank: int, case: Case, num_ranks: int, recipe: str) -> dict[str, Tensor]:
    """fp32 masters, a bf16 copy of them that computes, and gradients that are summed in fp32 in rank order."""
    masters, batch = build(case)
    optimizer = case.optimizer(masters.parameters())
    for step in range(case.num_steps):
        sums: dict[str, Tensor] = {}
        for micro_batch in range(num_ranks):
            model = copy.deepcopy(masters)
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
                parameter.grad = None
                # A gradient that autograd computes in fp32 (of a norm) stays so.
                parameter.grad_dtype = None
            for path, module in model.named_modules():
                if isinstance(module, nn.Linear) and "." in path:
                    computes_in_fp8(module, recipe)
            case.loss(model, batch(step, micro_batch)).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                grad = parameter.grad.float()
                sums[name] = sums[name] + grad if name in sums else grad
        for name, parameter in masters.named_parameters():
            parameter.grad = sums[name] * (1 / num_ranks)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in masters.named_parameters()}


@cache
def expected(model: str, recipe: str) -> dict[str, Tensor]:
    (weights,) = run_ranks(one_process, num_ranks=1, args=(case_of(model), 2, recipe))
    return weights


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize(("model", "recipe"), [("llama", "tensorwise"), ("gpt", "rowwise")])
def test_every_strategy_is_bit_equal_to_one_process_in_fp8(model: str, recipe: str, strategy: str) -> None:
    for result in run_ranks(on_ranks, num_ranks=2, args=(case_of(model), plan_of(strategy, recipe), True)):
        check_equal(result.weights, expected(model, recipe))


def test_fp8_is_not_bf16() -> None:
    """Or the test above could not fail."""
    plan = Plan(strategy="ddp", precision="bf16")
    (result, _) = run_ranks(on_ranks, num_ranks=2, args=(case_of("llama"), plan, False))
    assert any(not torch.equal(result.weights[name], one) for name, one in expected("llama", "tensorwise").items())


@pytest.mark.parametrize("across", ["zero1", "zero2"])
def test_states_over_all_ranks_have_the_bits_of_hybrid_sharding_in_fp8(across: str) -> None:
    mesh = Mesh(replicate=2, shard=2)
    hybrid, over_all = (
        run_ranks(on_ranks, num_ranks=4, args=(case_of("llama"), plan_of("fsdp", mesh=mesh, across=one), True))
        for one in ("ddp", across)
    )
    for found, wanted in zip(over_all, hybrid, strict=True):
        assert found.losses == wanted.losses
        check_equal(found.weights, wanted.weights)


def test_three_ranks_train_alike_under_ddp_and_fsdp() -> None:
    """Slices cut through weights."""
    first, *others = (
        result.weights
        for strategy in ("ddp", "fsdp")
        for result in run_ranks(on_ranks, num_ranks=3, args=(case_of("gpt", sgd), plan_of(strategy), False))
    )
    for weights in others:
        check_equal(weights, first)


SETTINGS: dict[str, dict[str, Any]] = {
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "two in flight, three ahead": {"prefetch": 3, "reduces_in_flight": 2},
    "states in host memory": {"offload_states": True},
    "dynamic": {"dynamic": True},
    "a mesh of two groups": {"mesh": Mesh(replicate=2, shard=1)},
    "states over all ranks": {"mesh": Mesh(replicate=2, shard=1), "across": "zero2"},
    "one block kept in bf16": {"keep_bf16": ("blocks.0",)},
    "a mix of strategies": {"overrides": {"blocks.1": "ddp", "blocks.2": "zero2"}},
}


def settled(rank: int, plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    """Accumulates, clips, evaluates, edits, loads and averages; returns weights, and losses without gradients."""
    torch.manual_seed(0)
    model, batch = make_tokens(SHAPES["gpt"])
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    average = shardwise.EMA(model, decay=0.5)
    losses = []

    def evaluate(step: int) -> None:
        with torch.no_grad():
            losses.append(cross_entropy(model, batch(step, rank)).item())

    evaluate(0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        with shardwise.accumulate(model):
            cross_entropy(model, batch(step, rank)).backward()
        cross_entropy(model, batch(step + 10, rank)).backward()
        shardwise.clip_grad_value_(model, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    evaluate(1)
    with average.applied():
        evaluate(1)
    evaluate(1)
    # Far larger weights than the scales were made for, then those of before.
    with shardwise.whole(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    evaluate(2)
    with shardwise.edit(model), torch.no_grad():
        for group in optimizer.param_groups:
            for part in group["params"]:
                part.mul_(16.0)
    evaluate(2)
    trained = model.state_dict()
    model.load_state_dict(start)
    evaluate(0)
    assert losses[-1] == losses[0]
    return trained, losses


@cache
def settled_by_ddp(keep_bf16: tuple[str, ...]) -> list[tuple[dict[str, Tensor], list[float]]]:
    return run_ranks(settled, num_ranks=2, args=(plan_of("ddp", keep_bf16=keep_bf16),))


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_gathers_in_fp8_change_nothing_with_everything_else_that_a_loop_does(setting: str) -> None:
    plan = plan_of("fsdp", **SETTINGS[setting])
    for (weights, losses), (wanted, expected_losses) in zip(
        run_ranks(settled, num_ranks=2, args=(plan,)), settled_by_ddp(plan.keep_bf16), strict=True
    ):
        assert losses == expected_losses
        check_equal(weights, wanted)


def gathered(rank: int, plan: Plan) -> dict[str, int]:
    """Return the bytes of the gathers of each unit in one step, and the number of operations that the tape differs in."""
    model, batch = make_tokens(SHAPES["llama"])
    optimizer = sgd(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    for step in range(3):
        with shardwise.tape(model) as tape:
            cross_entropy(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken = tape.take()
    program = [str(operation) for operation in engine_of(model).core.cursor.program.operations()]
    assert [str(entry) for entry in taken] == program
    assert all(type(parameter) is not nn.Parameter for parameter in model.get_submodule("blocks.0").parameters())
    return {entry.subject: entry.num_bytes for entry in taken if entry.kind is Kind.GATHER}


def test_the_tape_is_the_program_and_a_unit_gathers_half_the_bytes_in_one_gather() -> None:
    wide = run_ranks(gathered, num_ranks=2, args=(Plan(strategy="fsdp", precision="bf16"),))[0]
    for narrow in run_ranks(gathered, num_ranks=2, args=(plan_of("fsdp"),)):
        assert narrow["(root)"] == wide["(root)"]
        assert narrow["blocks.1"] <= 0.55 * wide["blocks.1"]
    # A slice cuts rows.
    assert run_ranks(gathered, num_ranks=2, args=(plan_of("fsdp", "rowwise"),))[0] == wide


def replanned(rank: int, plans: list[Plan]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = make_tokens(SHAPES["gpt"])
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plans[0])
    for step, plan in enumerate(plans):
        shardwise.replan(model, plan)
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    said = line(lambda: shardwise.replan(model, Plan(strategy="fsdp", precision="bf16")))
    assert said.startswith("shardwise.replan with precision = 'bf16', but the model was prepared with 'fp8'")
    return model.state_dict()


def test_replan_moves_between_gathers_in_fp8_and_replicated_weights() -> None:
    expected, _ = run_ranks(replanned, num_ranks=2, args=([plan_of("ddp")] * 4,))
    plans = [plan_of(strategy) for strategy in ("fsdp", "ddp", "shard_grad_op", "zero1")]
    for weights in run_ranks(replanned, num_ranks=2, args=(plans,)):
        check_equal(weights, expected)


class ReadingBlock(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.linear.weight.sum() if self.reads else y


def reading(rank: int) -> None:
    plan = plan_of("fsdp", units="class:ReadingBlock")
    model = nn.Sequential(ReadingBlock(reads=False), ReadingBlock(reads=True))
    shardwise.prepare(model, None, plan)
    said = line(lambda: model(torch.ones(2, 16)))
    assert "is gathered in fp8" in said
    assert "name the layer in keep_bf16" in said
    kept = nn.Sequential(ReadingBlock(reads=False), ReadingBlock(reads=True))
    shardwise.prepare(kept, None, plan_of("fsdp", units="class:ReadingBlock", keep_bf16=("1",)))
    assert kept(torch.ones(2, 16)).isfinite().all()
    # Replicated weights are there in bf16 at any time.
    whole = nn.Sequential(ReadingBlock(reads=True))
    shardwise.prepare(whole, None, plan_of("ddp", units="class:ReadingBlock"))
    assert whole[0].linear.weight.dtype is torch.bfloat16
    assert whole(torch.ones(2, 16)).isfinite().all()


def test_a_weight_that_other_code_reads_is_refused_where_only_fp8_was_gathered() -> None:
    run_ranks(reading, num_ranks=2)


def refused(rank: int) -> None:
    model, _ = make_tokens(SHAPES["gpt"])
    plan = Plan(precision="fp8")
    said = line(lambda: shardwise.prepare(model, None, plan))
    assert said == (
        "precision = 'fp8', and no linear layer of the model can multiply in it: blocks.0.attention.qkv.weight is "
        "32 → 96, below fp8_min_features = 1024; set precision = 'bf16'"
    )
    said = line(lambda: shardwise.prepare(model, None, plan_of("fsdp", engine="torch")))
    assert said == "engine = 'torch' has no precision = 'fp8': set precision = 'bf16', or engine = 'shardwise'"
    said = line(lambda: shardwise.prepare(model, None, plan_of("fsdp", keep_bf16=("nothing",))))
    assert said == "keep_bf16: nothing matches no module of the model"


def test_plans_that_cannot_have_fp8_are_refused_in_one_line() -> None:
    run_ranks(refused, num_ranks=2)


def not_finite(rank: int, strategy: str) -> list[float]:
    """Return losses with a weight that is all zeros, and after one that is infinite."""
    torch.manual_seed(0)
    model, batch = make_tokens(SHAPES["gpt"])
    with torch.no_grad():
        model.get_submodule("blocks.0.attention.out").weight.zero_()
    shardwise.prepare(model, None, plan_of(strategy))
    losses = []
    with torch.no_grad():
        losses.append(cross_entropy(model, batch(0, rank)).item())
        with shardwise.whole(model, write=True):
            model.get_submodule("blocks.0.attention.out").weight[0, 0] = torch.inf
        losses.append(cross_entropy(model, batch(0, rank)).item())
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_zeros_stay_zeros_and_a_weight_that_is_infinite_gives_nan(strategy: str) -> None:
    for zeros, infinite in run_ranks(not_finite, num_ranks=2, args=(strategy,)):
        assert zeros == zeros
        assert infinite != infinite


def graphed(rank: int, plan: Plan, *, steps: int = 10) -> tuple[dict[str, Tensor], int]:
    """Return weights, and the number of calls of units that were replays."""
    torch.manual_seed(0)
    model, batch = make_tokens(SHAPES["gpt"])
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan)
    for step in range(steps):
        cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    graphs = engine_of(model).graphs
    return model.state_dict(), graphs.num_replayed if graphs is not None else 0


def graphed_and_ordinary(rank: int, plan: Plan) -> None:
    expected, _ = graphed(rank, plan)
    with simulated():
        weights, num_replayed = graphed(rank, plan)
    check_equal(weights, expected)
    assert num_replayed > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_units_as_graphs_have_the_bits_of_ordinary_ones_in_fp8(strategy: str) -> None:
    run_ranks(graphed_and_ordinary, num_ranks=2, args=(plan_of(strategy),))


def copied(rank: int, strategy: str) -> None:
    model, batch = make_tokens(SHAPES["gpt"])
    classes = [type(module) for module in model.modules()][1:]
    shardwise.prepare(model, None, plan_of(strategy))
    copied = copy.deepcopy(model)
    assert [type(module) for module in copied.modules()][1:] == classes
    assert not any("fp8_weight" in vars(module) for module in copied.modules())
    assert copied(batch(0, rank)[0]).isfinite().all()
    # The model itself still multiplies in fp8.
    assert isinstance(model.get_submodule("blocks.0.attention.out"), Fp8Linear)
    assert cross_entropy(model, batch(0, rank)).isfinite()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_copy_of_a_prepared_model_is_an_ordinary_one(strategy: str) -> None:
    run_ranks(copied, num_ranks=2, args=(strategy,))


def test_frameworks_that_say_bf16_take_a_plan_that_says_fp8() -> None:
    plan = Plan(precision="fp8")
    assert asked_plan(plan, said="bf16", setting="bf16=True") is plan
    with pytest.raises(ShardwiseError, match="use bf16, or Plan"):
        asked_plan(plan, said="fp16", setting="fp16=True")
