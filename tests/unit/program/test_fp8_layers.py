"""Which layers multiply in fp8, and how their weights are gathered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.base.vocabulary.layout import ALIGNMENT, lay_out
from shardwise.plan import Plan
from shardwise.program.buffers import flat_specs, gather_bytes, linear_layers, why_not_fp8
from shardwise.program.spec import TensorSpec, UnitSpec
from shardwise.program.units import model_spec

PLAN = Plan(precision="fp8")
WEIGHT = TensorSpec(name="blocks.3.up.weight", shape=(4096, 1024), linear=True)


@pytest.mark.parametrize(
    ("changed", "unit", "plan", "why"),
    [
        ({}, "blocks.3", {}, ""),
        ({}, "(root)", {}, "is in no unit but the root"),
        ({"linear": False}, "blocks.3", {}, "is not the weight of an nn.Linear"),
        ({"linear": False, "aliases": ("head.weight",)}, "blocks.3", {}, "shares its weight with head.weight"),
        ({"shape": (4096, 1000)}, "blocks.3", {}, "is 1000 → 4096, which must be multiples of 16"),
        ({"shape": (512, 4096)}, "blocks.3", {}, "is 4096 → 512, below fp8_min_features = 1024"),
        ({}, "blocks.3", {"keep_bf16": ("blocks.3",)}, "is kept in bf16"),
        ({}, "blocks.3", {"keep_fp32": ("*.up",)}, "is kept in fp32"),
    ],
)
def test_a_layer_says_why_it_does_not_multiply_in_fp8(changed: dict, unit: str, plan: dict, why: str) -> None:
    values = {"name": WEIGHT.name, "shape": WEIGHT.shape, "linear": True, **changed}
    assert why_not_fp8(TensorSpec(**values), unit=unit, plan=Plan(precision="fp8", **plan)) == why


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.attention = nn.MultiheadAttention(1024, 8)
        self.up = nn.Linear(1024, 4096)
        self.tied = nn.Linear(1024, 4096)
        self.tied.weight = self.up.weight
        self.down = nn.Linear(4096, 1024)
        self.patched = nn.Linear(1024, 1024)
        self.patched.forward = lambda x: x  # type: ignore[method-assign]


def test_layers_of_a_model_are_found_with_their_reasons() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(1024, 1024))
    spec = model_spec(model, policy="class:Block")
    found = {layer.weight.name: layer.why_not for layer in linear_layers(spec, plan=PLAN)}
    assert {name: why for name, why in found.items() if not name.startswith("1.")} == {
        "2.weight": "is in no unit but the root",
        "0.up.weight": "shares its weight with 0.tied.weight",
        "0.down.weight": "",
    }


def test_norms_and_biases_travel_with_fp8_weights_and_large_parameters_do_not() -> None:
    norm, table = TensorSpec(name="u.norm.weight", shape=(1024,)), TensorSpec(name="u.table", shape=(1024, 1024))
    small = UnitSpec(name="u", class_name="Block", params=(WEIGHT, norm))
    (flat,) = flat_specs(small, plan=PLAN)
    assert flat.params == (norm, WEIGHT)
    assert flat.num_fp8 == 1
    assert gather_bytes(small, plan=PLAN, sharded=True) == 4096 * 1024 + 2 * 1024
    assert gather_bytes(small, plan=PLAN, sharded=False) == 2 * (4096 * 1024 + 1024)
    large = UnitSpec(name="u", class_name="Block", params=(table, WEIGHT))
    assert [(flat.params, flat.num_fp8) for flat in flat_specs(large, plan=PLAN)] == [((table,), 0), ((WEIGHT,), 1)]
    for other in (Plan(precision="bf16"), Plan(precision="fp8", fp8_recipe="rowwise")):
        (flat,) = flat_specs(small, plan=other)
        assert (flat.params, flat.num_fp8) == ((WEIGHT, norm), 0)


@given(
    wide=st.lists(st.integers(0, 300), max_size=5),
    narrow=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    num_slices=st.integers(1, 40),
)
def test_wide_parameters_have_room_in_one_slice_and_none_overlap(
    wide: list[int], narrow: list[int], num_slices: int
) -> None:
    sizes = [*wide, *narrow]
    layout = lay_out([(size,) for size in sizes], num_slices=num_slices, num_wide=len(wide), width=2)
    assert layout.num_elements % (num_slices * ALIGNMENT) == 0
    end = 0
    for index, (offset, size) in enumerate(layout.sizes()):
        room = 2 * size if index < len(wide) else size
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + room
        if index < len(wide) and size:
            assert offset // layout.slice_elements == (end - 1) // layout.slice_elements
    assert end <= layout.num_elements
