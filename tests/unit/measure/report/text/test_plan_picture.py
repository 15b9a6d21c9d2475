"""A plan on a model as text: the placement of each unit, and what lives in host memory."""

from shardwise.measure.report.snapshots import snapshots_of
from shardwise.measure.report.text.plan_picture import explain_plan, plan_as_data
from shardwise.measure.report.text.step_picture import picture_model
from shardwise.plan import Plan

SPEC = picture_model()


def test_the_table_says_what_lives_in_host_memory() -> None:
    plan = Plan(offload_states=["blocks.1", "blocks.2"], offload_activations=["blocks.2"])
    lines = explain_plan(SPEC, plan=plan, num_ranks=2)
    cells = [line.split("  ") for line in lines]
    table = {row[0].strip(): row[-1].strip() for row in cells if row[0].startswith(("units", "blocks", "(root)"))}
    assert table["units"] == "in host memory"
    assert table["blocks.1"] == "states"
    assert table["blocks.2"] == "states, activations"
    units = plan_as_data(SPEC, plan=plan, num_ranks=2)["units"]
    assert {unit["name"]: unit["host"] for unit in units if unit["host"]} == {
        "blocks.1": ["states"],
        "blocks.2": ["states", "activations"],
    }


def test_without_host_memory_there_is_no_column() -> None:
    assert not any("host" in line for line in explain_plan(SPEC, plan=Plan(), num_ranks=2))


def test_replicated_units_stay_on_the_device() -> None:
    plan = Plan(offload_states=True, overrides={"blocks.0": "ddp"})
    units = {unit["name"]: unit["host"] for unit in plan_as_data(SPEC, plan=plan, num_ranks=2)["units"]}
    assert units["blocks.0"] == []
    assert units["blocks.1"] == ["states"]


def test_states_in_host_memory_are_not_held_on_the_device() -> None:
    kept, offloaded = (
        snapshots_of(SPEC, plan=Plan(offload_states=states), num_ranks=2).snapshots[0].held_bytes
        for states in (False, ["blocks.1"])
    )
    params = sum(param.num_elements for unit in SPEC.units if unit.name == "blocks.1" for param in unit.params)
    # The slice of the parameters and of two moments, in fp32.
    assert kept - offloaded == params * 12 // 2
