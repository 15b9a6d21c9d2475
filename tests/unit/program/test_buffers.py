"""Which parameters share a flat buffer, and in which dtypes: one answer for engine, program and planner."""

import pytest

from shardwise.plan import Plan
from shardwise.program import Kind, build
from shardwise.program.buffers import flat_specs, gather_bytes, reduce_bytes, update_gather_bytes
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec


def unit(*params: TensorSpec) -> UnitSpec:
    return UnitSpec(name=ROOT, class_name="Net", params=params)


MIXED = unit(
    TensorSpec(name="weight", shape=(10,)),
    TensorSpec(name="table", shape=(6,), dtype="int64", trainable=False),
    TensorSpec(name="norm", shape=(4,), keep_fp32=True),
    TensorSpec(name="waves", shape=(3,), dtype="complex64"),
)


def dtypes(precision: str) -> dict[str, tuple[str, str, str]]:
    flats = flat_specs(MIXED, plan=Plan(precision=precision))
    return {p.name: (f.compute_dtype, f.master_dtype, f.reduce_dtype) for f in flats for p in f.params}


def test_only_floating_point_parameters_change_their_dtype() -> None:
    assert dtypes("bf16") == {
        "weight": ("bfloat16", "float32", "float32"),
        "table": ("int64", "int64", "int64"),
        "norm": ("float32", "float32", "float32"),
        "waves": ("complex64", "complex64", "complex64"),
    }


def test_integers_are_gathered_in_their_own_size_and_never_reduced() -> None:
    plan = Plan(strategy="fsdp", precision="bf16")
    assert gather_bytes(MIXED, plan=plan, sharded=True) == 2 * 10 + 8 * 6 + 4 * 4 + 8 * 3
    assert reduce_bytes(MIXED, plan=plan) == 4 * 10 + 4 * 4 + 8 * 3


def test_the_program_counts_the_bytes_of_the_buffers() -> None:
    plan = Plan(strategy="fsdp", precision="bf16")
    program = build(ModelSpec(name="net", units=(MIXED,), call_order=(ROOT,)), plan=plan)
    sizes = {operation.kind: operation.num_bytes for operation in program.operations()}
    assert sizes[Kind.GATHER] == gather_bytes(MIXED, plan=plan, sharded=True)
    assert sizes[Kind.REDUCE] == reduce_bytes(MIXED, plan=plan)


@pytest.mark.parametrize("precision", ["fp32", "native"])
def test_parameters_of_equal_dtypes_share_a_buffer_and_others_do_not(precision: str) -> None:
    flats = flat_specs(MIXED, plan=Plan(precision=precision))
    assert [[param.name for param in flat.params] for flat in flats] == [["weight", "norm"], ["table"], ["waves"]]


ADAPTED = unit(
    TensorSpec(name="base", shape=(64, 10), trainable=False),
    TensorSpec(name="adapter", shape=(4, 10)),
    TensorSpec(name="bias", shape=(64,), trainable=False),
)


@pytest.mark.parametrize(
    ("precision", "master"), [("bf16", "bfloat16"), ("native", "bfloat16"), ("fp32", "float32"), ("fp16", "float32")]
)
def test_a_frozen_parameter_that_computes_as_it_was_given_has_no_wider_master(precision: str, master: str) -> None:
    base = TensorSpec(name="base", shape=(64,), dtype="bfloat16", trainable=False)
    trained = TensorSpec(name="trained", shape=(64,), dtype="bfloat16")
    (frozen, other) = flat_specs(unit(base, trained), plan=Plan(precision=precision))
    assert frozen.master_dtype == master
    assert other.master_dtype == ("bfloat16" if precision == "native" else "float32")
    assert (frozen.unstepped, other.unstepped) == (precision == "bf16", False)
    # What was given in fp32 keeps its digits, and what is frozen later its master.
    (wide, switched) = flat_specs(
        unit(TensorSpec(name="wide", shape=(64,), trainable=False), trained.trained_now(False)),
        plan=Plan(precision="bf16"),
    )
    assert wide.master_dtype == switched.master_dtype == "float32"


def test_frozen_parameters_lie_in_a_buffer_of_their_own_of_which_nothing_is_reduced() -> None:
    plan = Plan(strategy="zero2", precision="bf16")
    flats = flat_specs(ADAPTED, plan=plan)
    assert [[param.name for param in flat.params] for flat in flats] == [["base", "bias"], ["adapter"]]
    assert [flat.is_trained for flat in flats] == [False, True]
    assert gather_bytes(ADAPTED, plan=plan, sharded=True) == 2 * (640 + 40 + 64)
    assert update_gather_bytes(ADAPTED, plan=plan) == 2 * 40
    assert reduce_bytes(ADAPTED, plan=plan) == 4 * 40


def test_a_parameter_that_is_thawed_or_frozen_later_stays_in_its_buffer_which_then_goes_as_a_whole() -> None:
    base, adapter, bias = ADAPTED.params
    thawed = unit(base, adapter.trained_now(False), bias.trained_now(True))
    plan = Plan()
    names = [
        [[param.name for param in flat.params] for flat in flat_specs(one, plan=plan)] for one in (ADAPTED, thawed)
    ]
    assert names[0] == names[1]
    assert reduce_bytes(thawed, plan=plan) == 4 * (640 + 64)
    assert (
        unit(
            base,
            *(
                param.trained_now(was.trainable)
                for param, was in zip(thawed.params[1:], ADAPTED.params[1:], strict=True)
            ),
        )
        == ADAPTED
    )


def test_narrow_reduction_does_not_narrow_wide_parameters() -> None:
    wide = unit(TensorSpec(name="weight", shape=(10,), dtype="float64"))
    (flat,) = flat_specs(wide, plan=Plan(precision="native", reduce_dtype="bf16"))
    assert flat.reduce_dtype == "float64"
