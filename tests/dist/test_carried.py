"""What a quantised parameter carries as attributes comes from rank 0, as the parameter itself does.

`Packed` has the form of bitsandbytes' Params4bit: packed bytes, and a state with tensors, one of them nested.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from training import line

from shardwise import Plan, prepare
from shardwise.engine.guards.carried import describe_carried


@dataclass
class State:
    absmax: Tensor
    code: Tensor
    blocksize: int = 4
    quant_type: str = "nf4"
    dtype: torch.dtype = torch.float32
    state2: "State | None" = None


class Packed(nn.Parameter):
    def __new__(cls, data: Tensor, quant_state: Any = None, module: Any = None) -> "Packed":
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state, self.module = quant_state, module
        return self


class Quantised(nn.Module):
    """A frozen weight of 16 values in blocks of 4, each with a scale; the scales are scaled once more."""

    def __init__(self, *, seed: int, blocksize: int = 4, num_scales: int = 4) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        nested = State(absmax=torch.rand(1, generator=random), code=torch.arange(4.0))
        state = State(
            absmax=torch.rand(num_scales, generator=random),
            code=torch.randn(256, generator=random),
            blocksize=blocksize,
            state2=nested,
        )
        self.weight = Packed(torch.randint(256, (16, 1), dtype=torch.uint8, generator=random), state, self)
        # The same object a second time, as bitsandbytes has it.
        self.quant_state = state

    def unpacked(self) -> Tensor:
        state = self.weight.quant_state
        scales = state.absmax * state.state2.absmax
        return state.code[self.weight.long()].view(4, 4) * scales.view(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.unpacked()


class Net(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.base = Quantised(**options)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def outputs(rank: int, strategy: str, engine: str) -> tuple[list[float], list[float]]:
    """What the prepared model computes, and what rank 0's model did before."""
    torch.manual_seed(rank)
    model, first = Net(seed=rank), Net(seed=0)
    x = torch.arange(8.0).view(2, 4)
    expected = first.base(x)
    prepared, _ = prepare(model, None, Plan(strategy=strategy, engine=engine, precision="native"))
    got = prepared(x) - model.adapter(x) if strategy == "ddp" else None
    if got is None:
        # Sharded, the adapter is whole only inside a forward.
        found = []
        model.base.register_forward_hook(lambda module, inputs, output: found.append(output.detach().clone()))
        prepared(x)
        got = found[0]
    return got.detach().flatten().tolist(), expected.flatten().tolist()


@pytest.mark.ledger("nf4-state", outcome="right")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_the_state_of_a_quantised_weight_comes_from_rank_0(strategy: str) -> None:
    for got, expected in run_ranks(outputs, num_ranks=2, args=(strategy, "shardwise")):
        assert got == pytest.approx(expected, rel=1e-5)


def test_also_on_torchs_engine() -> None:
    for got, expected in run_ranks(outputs, num_ranks=2, args=("ddp", "torch")):
        assert got == pytest.approx(expected, rel=1e-5)


def disagree(rank: int, option: str) -> str:
    model = Net(seed=0, **{option: 4 + 4 * rank})
    return line(lambda: prepare(model, None, Plan(strategy="ddp", precision="native")))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("blocksize", "base.weight.quant_state.blocksize = 4 | base.weight.quant_state.blocksize = 8"),
        (
            "num_scales",
            "base.weight.quant_state.absmax [4] torch.float32 | base.weight.quant_state.absmax [8] torch.float32",
        ),
    ],
)
def test_states_of_another_form_are_one_line(option: str, says: str) -> None:
    for refused in run_ranks(disagree, num_ranks=2, args=(option,)):
        assert says in refused


def store_as_floats(rank: int, precision: str) -> str:
    model = Net(seed=0)
    packed = model.base.weight
    model.base.weight = Packed(packed.data.view(8, 2).view(torch.bfloat16), packed.quant_state, model.base)
    return line(lambda: prepare(model, None, Plan(strategy="fsdp", precision=precision)))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_packed_bits_that_are_called_floats_are_not_cast(precision: str) -> None:
    (refused,) = run_ranks(store_as_floats, num_ranks=1, args=(precision,))
    assert refused.startswith(
        f"base.weight is a quantised weight that is stored as bfloat16, and precision = '{precision}' would change its"
    )
    assert "store it as uint8 (bitsandbytes: quant_storage=torch.uint8), or set precision = 'native'" in refused


def test_only_tensors_count_and_the_values_with_them() -> None:
    model = nn.Linear(2, 2)
    model.weight.note, model.weight.owner, model.weight.place = "mine", model, {"rank": 3}
    model.weight.itself = model.weight
    assert describe_carried(model) == []
    model.weight.scale = [torch.ones(2), 3]
    assert describe_carried(model) == ["weight.scale.0 [2] torch.float32", "weight.scale.1 = 3"]
