"""fp8: every strategy computes what one process computes with reference casts, bit by bit."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import adamw, make_tokens, sgd
from ranks import run_ranks
from torch import Tensor, nn
from training import Case, build, on_ranks

from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

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


def test_three_ranks_train_alike_under_ddp_and_fsdp() -> None:
    """Slices cut through weights."""
    first, *others = (
        result.weights
        for strategy in ("ddp", "fsdp")
        for result in run_ranks(on_ranks, num_ranks=3, args=(case_of("gpt", sgd), plan_of(strategy), False))
    )
    for weights in others:
        check_equal(weights, first)
