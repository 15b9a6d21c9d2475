"""The program of a step, written out for small models; test_properties.py says what holds of every program."""

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program import Kind, Operation, Trigger, build
from shardwise.program.buffers import MOST_PIECES, PIECE_BYTES
from shardwise.program.operations import ON_BUCKETS
from shardwise.program.spec import NONE, ROOT, UNANNOUNCED, ModelSpec, TensorSpec, UnitSpec


def unit(name: str) -> UnitSpec:
    weight = TensorSpec(name=f"{name}.weight", shape=(10,))
    return UnitSpec(name=name, class_name="Block", params=(weight,))


def model(*calls: str, never_called: tuple[str, ...] = ()) -> ModelSpec:
    """A model whose forward calls the root and then these units, of 10 fp32 parameters each."""
    names = dict.fromkeys((ROOT, *calls, *never_called))
    return ModelSpec(name="example", units=tuple(map(unit, names)), call_order=(ROOT, *calls))


def lines(spec: ModelSpec, **settings: object) -> list[str]:
    """One line per row that has operations; where gradients are taken is said once, below."""
    program = build(spec, plan=Plan.from_dict(settings))
    shown = [[one for one in row.operations if one.kind is not Kind.TAKE_GRADS] for row in program.rows]
    return ["; ".join(map(str, operations)) for operations in shown if operations]


# Written out: what each strategy does with a model of two blocks.

TWO_BLOCKS = model("blocks.0", "blocks.1")


def test_ddp_gathers_and_frees_nothing_and_reduces_each_bucket_once() -> None:
    assert lines(TWO_BLOCKS, strategy="ddp", bucket_bytes=60) == [
        "forward (root)",
        "forward blocks.0",
        "forward blocks.1",
        "backward (root)",
        "backward blocks.1",
        "backward blocks.0",
        "reduce blocks.1+blocks.0",
        "reduce (root)",
        "reduce flags (root); wait reduce blocks.1+blocks.0; wait reduce (root)",
        "update (root)",
    ]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_replicated_params_with_sharded_optim_are_gathered_after_the_update(strategy: str) -> None:
    operations = lines(TWO_BLOCKS, strategy=strategy)
    assert operations[:3] == [
        # The gathers are those of the step before.
        "wait gather (root); forward (root)",
        "wait gather blocks.0; forward blocks.0",
        "wait gather blocks.1; forward blocks.1",
    ]
    assert operations[-1] == "update (root); gather (root); gather blocks.0; gather blocks.1"


def test_zero2_reduces_unit_by_unit() -> None:
    assert lines(TWO_BLOCKS, strategy="zero2", reduces_in_flight=1)[3:-1] == [
        "backward (root)",
        "backward blocks.1",
        "reduce blocks.1",
        "backward blocks.0",
        "wait reduce blocks.1; reduce blocks.0",
        "wait reduce blocks.0; reduce (root)",
        "reduce flags (root); wait reduce (root)",
    ]


def test_shard_grad_op_gathers_once_and_frees_after_backward() -> None:
    assert lines(TWO_BLOCKS, strategy="shard_grad_op", prefetch=1, reduces_in_flight=2) == [
        "gather (root); gather blocks.0; wait gather (root); forward (root)",
        "gather blocks.1; wait gather blocks.0; forward blocks.0",
        "wait gather blocks.1; forward blocks.1",
        "backward (root)",
        "backward blocks.1",
        "free blocks.1; reduce blocks.1",
        "backward blocks.0",
        "free blocks.0; reduce blocks.0",
        "free (root); wait reduce blocks.1; reduce (root)",
        "reduce flags (root); wait reduce blocks.0; wait reduce (root)",
        "update (root)",
    ]


def test_fsdp_frees_after_forward_and_gathers_again_for_backward() -> None:
    assert lines(TWO_BLOCKS, strategy="fsdp", prefetch=1, reduces_in_flight=1) == [
        "gather (root); gather blocks.0; wait gather (root); forward (root)",
        "gather blocks.1; wait gather blocks.0; forward blocks.0",
        "free blocks.0",
        # The last unit and the root are not freed: backward begins with them.
        "wait gather blocks.1; forward blocks.1",
        "backward (root)",
        "gather blocks.0; backward blocks.1",
        "free blocks.1; reduce blocks.1",
        "wait gather blocks.0; backward blocks.0",
        "free blocks.0; wait reduce blocks.1; reduce blocks.0",
        "free (root); wait reduce blocks.0; reduce (root)",
        "reduce flags (root); wait reduce (root)",
        "update (root)",
    ]


def test_gradients_are_taken_after_the_parameters_are_freed_and_before_they_are_reduced() -> None:
    program = build(TWO_BLOCKS, plan=Plan(strategy="fsdp", reduces_in_flight=2))
    rows = ["; ".join(map(str, row.operations)) for row in program.rows if row.trigger is Trigger.GRADS_READY]
    assert rows[0] == "free blocks.1; take grads blocks.1; reduce blocks.1"


def test_a_pass_that_keeps_its_gradients_takes_them_and_reduces_nothing() -> None:
    spec = model("blocks.0", never_called=("head",))
    kept, reduced = (build(spec, plan=Plan(strategy="zero2"), reduces=reduces) for reduces in (False, True))
    kinds = [operation.kind for operation in kept.operations()]
    assert kinds.count(Kind.TAKE_GRADS) == 3
    assert not {Kind.REDUCE, Kind.WAIT_REDUCE, Kind.REDUCE_FLAGS} & set(kinds)
    assert [(row.trigger, row.unit, row.call) for row in kept.rows] == [
        (row.trigger, row.unit, row.call) for row in reduced.rows
    ]


def test_without_prefetch_a_unit_is_gathered_when_it_is_needed() -> None:
    assert lines(TWO_BLOCKS, strategy="fsdp", prefetch=0)[:7] == [
        "gather (root); wait gather (root); forward (root)",
        "gather blocks.0; wait gather blocks.0; forward blocks.0",
        "free blocks.0",
        "gather blocks.1; wait gather blocks.1; forward blocks.1",
        "backward (root)",
        "backward blocks.1",
        "free blocks.1; reduce blocks.1",
    ]


def test_an_outer_unit_stays_whole_while_the_units_inside_it_run() -> None:
    assert lines(model("a", "a.inner", "b"), strategy="fsdp", prefetch=0, reduces_in_flight=4) == [
        "gather (root); wait gather (root); forward (root)",
        "gather a; wait gather a; forward a",
        "gather a.inner; wait gather a.inner; forward a.inner",
        "free a.inner",
        "free a",
        "gather b; wait gather b; forward b",
        "backward (root)",
        "backward b",
        "free b; reduce b",
        "gather a; wait gather a; backward a",
        "gather a.inner; wait gather a.inner; backward a.inner",
        "free a.inner; reduce a.inner",
        "free a; reduce a",
        "free (root); reduce (root)",
        "reduce flags (root); wait reduce b; wait reduce a.inner; wait reduce a; wait reduce (root)",
        "update (root)",
    ]


def test_a_name_that_begins_like_another_is_not_inside_it() -> None:
    assert lines(model("blocks.1", "blocks.10"), strategy="fsdp", prefetch=0)[1:4] == [
        "gather blocks.1; wait gather blocks.1; forward blocks.1",
        "free blocks.1",
        "gather blocks.10; wait gather blocks.10; forward blocks.10",
    ]


def test_a_unit_called_twice_is_reduced_once_after_its_first_call_was_gone_back_through() -> None:
    assert lines(model("a", "b", "a"), strategy="fsdp", prefetch=0, reduces_in_flight=4) == [
        "gather (root); wait gather (root); forward (root)",
        "gather a; wait gather a; forward a",
        "free a",
        "gather b; wait gather b; forward b",
        "free b",
        "gather a; wait gather a; forward a",
        "backward (root)",
        "backward a",
        "gather b; wait gather b; backward b",
        "free b; reduce b",
        "backward a",
        "free a; reduce a",
        "free (root); reduce (root)",
        "reduce flags (root); wait reduce b; wait reduce a; wait reduce (root)",
        "update (root)",
    ]


def test_a_unit_called_twice_in_a_row_is_gathered_once_for_both() -> None:
    forward = lines(model("a", "a", "b"), strategy="fsdp", prefetch=0)[1:4]
    assert forward == ["gather a; wait gather a; forward a", "forward a", "free a"]


def test_a_unit_that_this_rank_never_calls_is_reduced_all_the_same() -> None:
    last = lines(model("a", never_called=("experts.7",)), strategy="fsdp", reduces_in_flight=1)[-2:]
    assert last == ["wait reduce (root); reduce experts.7; reduce flags (root); wait reduce experts.7", "update (root)"]


def test_units_may_differ() -> None:
    overrides = {"a": "ddp", "b": "shard_grad_op", "c": "zero1"}
    assert lines(model("a", "b", "c", "d"), strategy="fsdp", overrides=overrides, prefetch=0)[:6] == [
        "gather (root); wait gather (root); forward (root)",
        "forward a",
        "gather b; wait gather b; forward b",
        "wait gather c; forward c",
        "gather d; wait gather d; forward d",
        "backward (root)",
    ]


def test_buffers_come_from_rank_0_before_the_root_computes() -> None:
    statistics = TensorSpec(name="a.mean", shape=(3,), trainable=False)
    scratch = TensorSpec(name="a.scratch", shape=(100,), trainable=False, persistent=False)
    root = UnitSpec(name=ROOT, class_name="Net")
    a = UnitSpec(name="a", class_name="Norm", buffers=(statistics, scratch))
    spec = ModelSpec(name="norms", units=(root, a), call_order=(ROOT, "a"))
    first, *others = build(spec, plan=Plan(strategy="ddp")).operations()
    assert first == Operation(kind=Kind.BROADCAST, subject=ROOT, num_bytes=12)
    assert Kind.BROADCAST not in {operation.kind for operation in others}


@pytest.mark.parametrize(("precision", "gathered_bytes"), [("fp32", 40), ("bf16", 20), ("native", 40)])
def test_bytes_are_those_of_the_whole_unit_in_the_plans_dtypes(precision: str, gathered_bytes: int) -> None:
    program = build(TWO_BLOCKS, plan=Plan(strategy="fsdp", precision=precision, reduce_dtype="bf16"))
    moved = {(op.kind, op.num_bytes) for op in program.operations() if op.num_bytes}
    # And one flag of 4 bytes for each of three parameters.
    assert moved == {(Kind.GATHER, gathered_bytes), (Kind.REDUCE, 20), (Kind.REDUCE_FLAGS, 12)}


def test_what_is_kept_in_fp32_is_gathered_in_fp32() -> None:
    statistics = replace(TWO_BLOCKS.unit("blocks.0"), params=(TensorSpec(name="n", shape=(10,), keep_fp32=True),))
    spec = replace(TWO_BLOCKS, units=(*TWO_BLOCKS.units[:1], statistics, *TWO_BLOCKS.units[2:]))
    program = build(spec, plan=Plan(strategy="fsdp", precision="bf16", keep_fp32=("(root)",)))
    gathered = {op.subject: op.num_bytes for op in program.operations() if op.kind is Kind.GATHER}
    assert gathered == {"(root)": 40, "blocks.0": 40, "blocks.1": 20}


# Pieces


def of_gradients(spec: ModelSpec, *, reduces: bool = True, **settings: object) -> list[str]:
    program = build(spec, plan=Plan.from_dict(settings), reduces=reduces)
    kinds = (Kind.TAKE_GRADS, *ON_BUCKETS)
    shown = ["; ".join(str(one) for one in row.operations if one.kind in kinds) for row in program.rows]
    return [line for line in shown if line]


def test_the_next_piece_of_a_unit_is_taken_while_the_last_one_is_reduced() -> None:
    assert of_gradients(TWO_BLOCKS, strategy="fsdp", piece_bytes=20) == [
        "take grads blocks.1 1/2; reduce blocks.1 1/2; "
        "take grads blocks.1 2/2; wait reduce blocks.1 1/2; reduce blocks.1 2/2",
        "take grads blocks.0 1/2; wait reduce blocks.1 2/2; reduce blocks.0 1/2; "
        "take grads blocks.0 2/2; wait reduce blocks.0 1/2; reduce blocks.0 2/2",
        "take grads (root) 1/2; wait reduce blocks.0 2/2; reduce (root) 1/2; "
        "take grads (root) 2/2; wait reduce (root) 1/2; reduce (root) 2/2",
        "wait reduce (root) 2/2",
    ]


def test_pieces_that_are_kept_are_all_taken_at_once() -> None:
    kept = of_gradients(TWO_BLOCKS, reduces=False, strategy="zero2", piece_bytes=20)
    assert kept[0] == "take grads blocks.1 1/2; take grads blocks.1 2/2"


def test_slices_of_pieces_cross_a_second_axis_one_by_one() -> None:
    line = of_gradients(model("a"), strategy="zero2", piece_bytes=20, mesh=HYBRID)[1]
    assert line == (
        "take grads (root) 1/2; wait reduce a 2/2; reduce slice a 2/2; wait slice a 1/2; reduce (root) 1/2; "
        "take grads (root) 2/2; wait reduce (root) 1/2; reduce slice (root) 1/2; wait slice a 2/2; reduce (root) 2/2"
    )


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"strategy": "fsdp", "piece_bytes": 39}, [20] * 6),
        ({"strategy": "zero2", "piece_bytes": 15}, [13, 13, 14] * 3),
        ({"strategy": "fsdp", "piece_bytes": 40}, [40] * 3),
        ({"strategy": "fsdp", "piece_bytes": 0}, [40] * 3),
        ({"strategy": "fsdp"}, [40] * 3),
        # The buffer of replicated gradients becomes the gradients; torch's engine has a schedule of its own.
        ({"strategy": "zero1", "piece_bytes": 10}, [120]),
        ({"strategy": "fsdp", "piece_bytes": 10, "engine": "torch"}, [40] * 3),
    ],
)
def test_pieces_are_equal_and_no_larger_than_the_plan_says(settings: dict[str, object], sizes: list[int]) -> None:
    assert [bucket.num_bytes for bucket in build(TWO_BLOCKS, plan=Plan.from_dict(settings)).buckets] == sizes


def test_a_unit_has_a_limited_number_of_pieces() -> None:
    large = replace(unit(ROOT), params=(TensorSpec(name="weight", shape=(MOST_PIECES,)),))
    spec = ModelSpec(name="large", units=(large,), call_order=(ROOT,))
    sizes = [bucket.num_bytes for bucket in build(spec, plan=Plan(piece_bytes=1)).buckets]
    assert sizes == [4] * MOST_PIECES


@pytest.mark.parametrize(("precision", "reduce_dtype", "num_pieces"), [("fp32", "fp32", 3), ("bf16", "bf16", 2)])
def test_by_default_units_that_come_once_are_cut_and_blocks_are_not(
    precision: str, reduce_dtype: str, num_pieces: int
) -> None:
    """A block is reduced while the next one computes."""
    spec, large = model("embed", "block"), (PIECE_BYTES // 2 + 2,)
    units = tuple(
        replace(unit, params=(replace(unit.params[0], shape=large),), from_root=unit.name == "embed")
        for unit in spec.units
    )
    plan = Plan(strategy="fsdp", precision=precision, reduce_dtype=reduce_dtype)
    found = Counter(bucket.units[0] for bucket in build(replace(spec, units=units), plan=plan).buckets)
    assert found == {ROOT: num_pieces, "embed": num_pieces, "block": 1}


# A mesh with a second axis


HYBRID = {"replicate": 2, "shard": 4}


@pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "fsdp"])
def test_a_slice_is_sent_on_before_the_last_one_is_waited_for(strategy: str) -> None:
    program = build(model("a", "b", "c"), plan=Plan.from_dict({"strategy": strategy, "mesh": HYBRID}))
    reduces = "; ".join(str(op) for op in program.operations() if op.kind in ON_BUCKETS)
    assert reduces == (
        "reduce c; "
        "wait reduce c; reduce slice c; reduce b; "
        "wait reduce b; reduce slice b; wait slice c; reduce a; "
        "wait reduce a; reduce slice a; wait slice b; reduce (root); "
        "wait reduce (root); reduce slice (root); wait slice a; wait slice (root)"
    )


def test_at_the_end_of_backward_slices_go_bucket_by_bucket() -> None:
    """All that is under way is waited for, the last slice last."""
    assert lines(TWO_BLOCKS, strategy="zero2", mesh=HYBRID, reduces_in_flight=3)[-2] == (
        "reduce flags (root); wait reduce blocks.1; reduce slice blocks.1; "
        "wait reduce blocks.0; reduce slice blocks.0; wait slice blocks.1; "
        "wait reduce (root); reduce slice (root); wait slice blocks.0; wait slice (root)"
    )


def test_a_replicated_bucket_has_no_slice_but_waits_for_the_one_before_it() -> None:
    assert lines(TWO_BLOCKS, strategy="zero2", mesh=HYBRID, overrides={"(root)": "ddp"})[-2] == (
        "reduce flags (root); wait reduce blocks.0; reduce slice blocks.0; wait slice blocks.1; "
        "wait reduce (root); wait slice blocks.0"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp", "mesh": HYBRID},
        {"strategy": "zero1", "mesh": HYBRID},
        {"strategy": "fsdp", "mesh": {"shard": 8}},
        {"strategy": "fsdp"},
        {"strategy": "ddp", "mesh": HYBRID, "engine": "torch"},
    ],
)
def test_no_slice_crosses_where_nothing_is_sharded_or_there_is_no_second_axis(settings: dict[str, object]) -> None:
    assert not any("slice" in line for line in lines(TWO_BLOCKS, **settings))


def test_a_slice_is_a_ranks_share_of_its_bucket_rounded_up() -> None:
    plan = Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=3))
    slices = [op.num_bytes for op in build(TWO_BLOCKS, plan=plan).operations() if op.kind is Kind.REDUCE_SLICE]
    assert slices == [14, 14, 14]


# How backward comes to a unit


def with_backward(spec: ModelSpec, name: str, how: str) -> ModelSpec:
    return replace(spec, units=tuple(replace(u, backward=how) if u.name == name else u for u in spec.units))


def test_a_unit_that_no_gradient_flows_through_is_gathered_for_forward_alone() -> None:
    spec = with_backward(TWO_BLOCKS, "blocks.0", NONE)
    for strategy in ("fsdp", "shard_grad_op"):
        operations = lines(spec, strategy=strategy, prefetch=0)
        assert operations[1:3] == ["gather blocks.0; wait gather blocks.0; forward blocks.0", "free blocks.0"]
        assert not any("blocks.0" in line for line in operations[3:] if "reduce blocks.0" not in line)


def test_a_unit_that_backward_comes_to_unannounced_stays_whole_until_then() -> None:
    spec = with_backward(TWO_BLOCKS, "blocks.0", UNANNOUNCED)
    assert lines(spec, strategy="fsdp", prefetch=0)[1:-2] == [
        "gather blocks.0; wait gather blocks.0; forward blocks.0",
        "gather blocks.1; wait gather blocks.1; forward blocks.1",
        "backward (root)",
        "backward blocks.1",
        "free blocks.1; reduce blocks.1",
        "free blocks.0; wait reduce blocks.1; reduce blocks.0",
        "free (root); wait reduce blocks.0; reduce (root)",
    ]


def test_a_recomputation_finds_the_units_inside_it_whole() -> None:
    recompute = {"recompute_overrides": {"a": "full"}}
    operations = lines(model("a", "a.x", "a.y", "b"), strategy="fsdp", prefetch=0, **recompute)
    backward = operations[operations.index("backward b") + 2 :]
    assert backward[:3] == [
        "gather a; wait gather a; gather a.x; wait gather a.x; gather a.y; wait gather a.y; backward a",
        "backward a.y",
        "free a.y; wait reduce b; reduce a.y",
    ]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_pass_that_leaves_its_gradients_to_a_later_one_reduces_nothing(strategy: str) -> None:
    plan = Plan(strategy=strategy, mesh=Mesh(replicate=2, shard=2))
    whole = build(TWO_BLOCKS, plan=plan)
    kept = build(TWO_BLOCKS, plan=plan, reduces=False)
    reduces = (*ON_BUCKETS, Kind.REDUCE_FLAGS)
    assert list(kept.operations()) == [op for op in whole.operations() if op.kind not in reduces]
    assert kept.buckets == whole.buckets


def test_backward_prefetches_an_outer_unit_before_the_units_inside_it() -> None:
    operations = lines(model("a", "b", "b.inner", "c"), strategy="fsdp", prefetch=1)
    assert [line for line in operations[operations.index("backward (root)") :] if "backward" in line] == [
        "backward (root)",
        "gather b; backward c",
        "gather b.inner; wait gather b; backward b",
        "gather a; wait gather b.inner; backward b.inner",
        "wait gather a; backward a",
    ]


def test_a_unit_that_this_rank_never_calls_is_gathered_after_the_update() -> None:
    last = lines(model("a", never_called=("experts.7",)), strategy="zero2")[-1]
    assert "gather experts.7" in last


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(("a", "a.inner"), id="the outermost of the last units is needed first in backward"),
        pytest.param(("a", "a.inner", "a"), id="an outer unit is called twice in a row"),
        pytest.param(("a", "b", "a"), id="a unit is called again within the prefetch distance"),
    ],
)
def test_nothing_is_freed_only_to_be_gathered_again_at_once(calls: tuple[str, ...]) -> None:
    freed: set[str] = set()
    for operation in build(model(*calls), plan=Plan(strategy="fsdp", prefetch=1)).operations():
        if operation.kind in (Kind.FORWARD, Kind.BACKWARD) and operation.subject != ROOT:
            freed.clear()
        elif operation.kind is Kind.FREE:
            freed.add(operation.subject)
        assert not (operation.kind is Kind.GATHER and operation.subject in freed)
