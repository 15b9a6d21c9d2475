"""LoRA and QLoRA as the planner sees them: what is trained, what is packed, and what a step keeps."""

import pytest

from shardwise.base.errors import InvalidModel, InvalidPlan, UnknownName
from shardwise.models.reference import Model
from shardwise.models.specs.spec_request import Adaptation, adaptation_of
from shardwise.plan import Plan
from shardwise.planner.memory.peak import estimate
from shardwise.program.spec import ModelSpec

PLAN = Plan(strategy="ddp", precision="bf16", micro_batch=2)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "off")


def spec_of(adaptation: Adaptation | None) -> ModelSpec:
    return Model("llama-tiny", seq=32, adaptation=adaptation).spec_for(PLAN)


def num_trained(spec: ModelSpec) -> int:
    return sum(param.num_elements for unit in spec.units for param in unit.params if param.trainable)


def test_only_the_adapters_of_the_targets_are_trained_and_the_base_is_in_bf16() -> None:
    spec = spec_of(Adaptation(rank=8, targets=("q_proj", "v_proj")))
    # 4 blocks; q: 128 → 128, v: 128 → 64.
    assert num_trained(spec) == 4 * 8 * ((128 + 128) + (128 + 64))
    frozen = {param.dtype for unit in spec.units for param in unit.params if not param.trainable}
    assert frozen == {"bfloat16"}


def test_a_packed_layer_has_half_a_byte_per_element_and_keeps_no_input() -> None:
    plain, packed = spec_of(Adaptation(rank=8)), spec_of(Adaptation(rank=8, quantize="nf4"))
    assert num_trained(plain) == num_trained(packed)
    (layer,) = [param for param in packed.units[1].params if "attention.q.base_layer" in param.name]
    assert (layer.num_bytes, layer.dtype, layer.trainable) == (128 * 128 // 2, "uint8", False)
    both = [estimate(spec, plan=PLAN, num_ranks=1, batch=2, optimizer="adamw") for spec in (plain, packed)]
    assert both[1].allocated_bytes < both[0].allocated_bytes
    unpacked = [op for row in packed.traces[0].rows for op in row.stream.ops if op.name == "dequantize_nf4"]
    # Four blocks of seven layers, in forward and in backward; what goes into the first block needs no gradient of its
    # queries, keys and values.
    assert len(unpacked) == 4 * 7 * 2 - 3


def test_a_mistake_is_one_line() -> None:
    with pytest.raises(InvalidModel, match="--lora-targets qq: llama-tiny has no linear .* it has down, gate, k, out"):
        spec_of(Adaptation(rank=8, targets=("qq",)))
    with pytest.raises(InvalidModel, match="params:7b: --lora is for models by name"):
        Model("params:7b", adaptation=Adaptation(rank=8))
    with pytest.raises(InvalidPlan, match="--quantize nf4: needs --lora RANK"):
        adaptation_of(None, targets=None, quantize="nf4")
    with pytest.raises(UnknownName, match="unknown quantisation 'nf5'"):
        adaptation_of(8, targets=None, quantize="nf5")


def test_the_base_computes_in_its_own_dtype_and_native_adapters_too() -> None:
    for precision, base, adapters in (
        ("bf16", "bfloat16", "float32"),
        ("fp16", "float16", "float32"),
        ("native", "bfloat16", "bfloat16"),
    ):
        asked = adaptation_of(8, targets=None, quantize=None, precision=precision)
        assert asked is not None
        params = [param for unit in spec_of(asked).units for param in unit.params]
        assert {param.dtype for param in params if not param.trainable} == {base}
        assert {param.dtype for param in params if param.trainable} == {adapters}
