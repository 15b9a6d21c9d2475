"""The programs of torch's own engines, written out for a model of two blocks."""

import pytest

from shardwise.plan import Plan
from shardwise.program import Kind, Trigger, build
from shardwise.program.build import rules_of
from shardwise.program.rules.ddp import DDP
from shardwise.program.rules.fully_shard import FULLY_SHARD
from shardwise.program.rules.ours import OURS
from shardwise.program.spec import NONE, ROOT, ModelSpec, TensorSpec, UnitSpec

HYBRID = {"replicate": 2, "shard": 2}


def unit(name: str, *, trainable: bool = True, backward: str = "announced") -> UnitSpec:
    weight = TensorSpec(name=f"{name}.weight", shape=(10,), trainable=trainable)
    return UnitSpec(name=name, class_name="Block", params=(weight,), backward=backward)


def model(*calls: str, **others: UnitSpec) -> ModelSpec:
    """A model whose forward calls the root and then these units, of 10 fp32 parameters each."""
    names = dict.fromkeys((ROOT, *calls))
    units = tuple(others.get(name, unit(name)) for name in names)
    return ModelSpec(name="example", units=units, call_order=(ROOT, *calls))


def lines(spec: ModelSpec, *, reduces: bool = True, **settings: object) -> list[str]:
    """One line per row that has operations."""
    program = build(spec, plan=Plan.from_dict({"engine": "torch", **settings}), reduces=reduces)
    return ["; ".join(map(str, row.operations)) for row in program.rows if row.operations]


TWO_BLOCKS = model("blocks.0", "blocks.1")


def test_the_root_decides_which_engine_of_torch_runs_a_plan() -> None:
    assert rules_of(Plan(strategy="fsdp")) is OURS
    assert rules_of(Plan(strategy="ddp", engine="torch")) is DDP
    assert rules_of(Plan(strategy="shard_grad_op", engine="torch")) is FULLY_SHARD
    assert rules_of(Plan(strategy="ddp", overrides={ROOT: "fsdp"}, engine="torch")) is FULLY_SHARD


class TestDistributedDataParallel:
    def test_it_takes_each_gradient_at_once_and_reduces_each_bucket_once(self) -> None:
        assert lines(TWO_BLOCKS, strategy="ddp", bucket_bytes=60) == [
            "forward (root)",
            "forward blocks.0",
            "forward blocks.1",
            "backward (root)",
            "backward blocks.1",
            "take grads blocks.1",
            "backward blocks.0",
            "take grads blocks.0; reduce blocks.1+blocks.0",
            "take grads (root); reduce (root)",
            "wait reduce blocks.1+blocks.0; wait reduce (root)",
            "update (root)",
        ]

    def test_a_pass_that_keeps_its_gradients_reduces_nothing(self) -> None:
        kept = lines(TWO_BLOCKS, strategy="ddp", reduces=False)
        assert not any("reduce" in line for line in kept)
        assert sum("take grads" in line for line in kept) == 3


class TestFullyShard:
    def test_a_unit_is_gathered_when_it_is_called_and_the_one_before_it_ahead_in_backward(self) -> None:
        assert lines(TWO_BLOCKS, strategy="fsdp") == [
            "gather (root); wait gather (root); forward (root)",
            "gather blocks.0; wait gather blocks.0; forward blocks.0",
            "free blocks.0",
            "gather blocks.1; wait gather blocks.1; forward blocks.1",
            "free blocks.1",
            # The flat buffer of the last gather goes; the root stays whole.
            "wait gather blocks.1",
            "gather blocks.1; backward (root)",
            "wait gather blocks.1; gather blocks.0; backward blocks.1",
            "free blocks.1; take grads blocks.1; reduce blocks.1",
            "wait gather blocks.0; backward blocks.0",
            "free blocks.0; wait reduce blocks.1; take grads blocks.0; reduce blocks.0",
            "free (root); wait reduce blocks.0; take grads (root); reduce (root); wait reduce (root)",
            "update (root)",
        ]

    def test_what_is_kept_after_forward_is_not_gathered_again(self) -> None:
        assert lines(TWO_BLOCKS, strategy="shard_grad_op")[3:] == [
            "wait gather blocks.1",
            "backward (root)",
            "backward blocks.1",
            "free blocks.1; take grads blocks.1; reduce blocks.1",
            "backward blocks.0",
            "free blocks.0; wait reduce blocks.1; take grads blocks.0; reduce blocks.0",
            "free (root); wait reduce blocks.0; take grads (root); reduce (root); wait reduce (root)",
            "update (root)",
        ]

    def test_slices_cross_a_second_axis_at_once_and_are_waited_for_last(self) -> None:
        assert lines(TWO_BLOCKS, strategy="shard_grad_op", mesh=HYBRID)[6:-1] == [
            "free blocks.1; take grads blocks.1; reduce blocks.1; reduce slice blocks.1",
            "backward blocks.0",
            "free blocks.0; wait reduce blocks.1; take grads blocks.0; reduce blocks.0; reduce slice blocks.0",
            "free (root); wait reduce blocks.0; take grads (root); reduce (root); reduce slice (root); "
            "wait reduce (root); wait slice (root)",
        ]

    def test_a_second_call_is_gathered_again_and_goes_back_to_the_call_before_it(self) -> None:
        spec = model("a", "b", "a")
        backward = lines(spec, strategy="fsdp")[8:13]
        assert backward == [
            "gather a; backward (root)",
            "wait gather a; gather b; backward a",
            "wait gather b; backward b",
            "free b; take grads b; reduce b",
            "backward a",
        ]

    @pytest.mark.parametrize("frozen", [unit("blocks.0", trainable=False), unit("blocks.0", backward=NONE)])
    def test_a_unit_whose_gradients_are_never_ready_is_left_to_the_end(self, frozen: UnitSpec) -> None:
        spec = model("blocks.0", "blocks.1", **{"blocks.0": frozen})
        program = build(spec, plan=Plan(strategy="shard_grad_op", engine="torch"))
        last = next(row for row in program.rows if row.trigger is Trigger.BACKWARD_DONE)
        assert next(op.kind for op in last.operations if op.subject == "blocks.0") is Kind.FREE
        assert [str(op) for op in last.operations][:2] == ["free (root)", "wait reduce blocks.1"]

    def test_a_pass_that_keeps_its_gradients_frees_and_takes(self) -> None:
        kept = lines(TWO_BLOCKS, strategy="fsdp", reduces=False)
        assert kept[8] == "free blocks.1; take grads blocks.1"
        assert not any("reduce" in line for line in kept)

    def test_buffers_are_each_ranks_own(self) -> None:
        norm = UnitSpec(
            name="norm",
            class_name="Norm",
            params=unit("norm").params,
            buffers=(TensorSpec(name="norm.mean", shape=(3,)),),
        )
        spec = model("norm", norm=norm)
        assert any("broadcast" in line for line in lines(spec, strategy="ddp"))
        assert not any("broadcast" in line for line in lines(spec, strategy="fsdp"))
