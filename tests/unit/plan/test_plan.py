import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import bad_plan_files, plans

import shardwise
from shardwise.base.errors import InvalidPlan
from shardwise.plan import Plan, as_plan
from shardwise.plan.placement import STRATEGIES, Mesh


@given(plan=plans)
def test_every_plan_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert list(loaded.overrides.items()) == list(plan.overrides.items())


@given(plan=plans)
def test_a_plan_is_a_value(plan: Plan) -> None:
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert hash(copy) == hash(plan)
    with pytest.raises(AttributeError):
        plan.strategy = "ddp"  # type: ignore[misc]


@given(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.booleans() | st.none(), max_size=4)
)
def test_whatever_a_table_holds_it_is_a_plan_or_one_line(data: dict[str, object]) -> None:
    try:
        Plan.from_dict(data)
    except InvalidPlan as error:
        assert len(str(error).splitlines()) == 1


def test_the_last_override_that_matches_wins() -> None:
    plan = Plan(strategy="fsdp", overrides={"blocks.*": "zero2", "blocks.1": "ddp", "head": STRATEGIES["zero1"]})
    assert plan.placements(["(root)", "blocks.0", "blocks.1", "head"]) == {
        "(root)": STRATEGIES["fsdp"],
        "blocks.0": STRATEGIES["zero2"],
        "blocks.1": STRATEGIES["ddp"],
        "head": STRATEGIES["zero1"],
    }


@pytest.mark.parametrize(
    ("typed", "name"),
    [("zero3", "fsdp"), ("full_shard", "fsdp"), ("FULL_SHARD", "fsdp"), ("no_shard", "ddp"), ("NO-SHARD", "ddp")],
)
def test_names_that_other_libraries_give_a_strategy_are_kept_as_ours(typed: str, name: str, tmp_path: Path) -> None:
    plan = Plan(strategy=typed, overrides={"head": typed})
    assert plan == Plan(strategy=name, overrides={"head": name})
    assert plan.strategy == name
    (tmp_path / "plan.toml").write_text(f'strategy = "{typed}"\n[overrides]\nhead = "{typed}"\n')
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_hybrid_shard_is_fsdp_on_a_mesh_and_nothing_without_one() -> None:
    mesh = Mesh(replicate=2, shard=4)
    assert Plan(strategy="hybrid_shard", mesh=mesh) == Plan(strategy="fsdp", mesh=mesh)
    assert Plan(mesh=mesh, overrides={"head": "hybrid_shard"}) == Plan(mesh=mesh, overrides={"head": "fsdp"})
    for wrong in ({}, {"mesh": Mesh(shard=8)}):
        with pytest.raises(InvalidPlan, match="fsdp on a mesh of nodes × ranks per node: give the mesh too"):
            Plan(strategy="hybrid_shard", **wrong)  # type: ignore[arg-type]


def test_the_name_of_a_strategy_stands_for_its_plan() -> None:
    assert as_plan("zero3") == Plan(strategy="fsdp")
    assert as_plan(plan := Plan(micro_batch=3)) is plan
    with pytest.raises(InvalidPlan, match="must be a shardwise.Plan, or the name of a strategy"):
        as_plan({"strategy": "fsdp"})  # type: ignore[arg-type]


def test_the_order_of_overrides_is_part_of_the_plan() -> None:
    one = Plan(overrides={"a*": "ddp", "*b": "zero1"})
    other = Plan(overrides={"*b": "zero1", "a*": "ddp"})
    assert one != other
    assert one.placements(["ab"]) != other.placements(["ab"])


def test_an_override_that_matches_no_unit_is_refused_with_the_units() -> None:
    with pytest.raises(InvalidPlan, match=r"overrides\.head matches no unit; the units are \(root\), blocks\.0"):
        Plan(overrides={"head": "ddp"}).placements(["(root)", "blocks.0"])


def test_a_plan_keeps_its_own_overrides() -> None:
    mine = {"head": "ddp"}
    plan = Plan(overrides=mine)
    mine["head"] = "zero1"
    assert plan.overrides["head"] == "ddp"


def test_equal_policies_in_other_words_make_equal_plans() -> None:
    assert Plan(units="class:A,B+head") == Plan(units="class: A, B + head")


@pytest.mark.parametrize(
    "arguments",
    [
        {"mesh": (2, 4)},
        {"overrides": "ddp"},
        {"overrides": {"a": 3}},
        {"overrides": {3: "ddp"}},
        {"capture": 1},
        {"capture": ("auto",)},
        {"offload_states": True, "owned": ("*",)},
        {"engine": "torch", "collectives": "ring"},
    ],
)
def test_what_cannot_be_is_refused_where_it_is_made(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidPlan):
        Plan(**arguments)  # type: ignore[arg-type]


def test_every_bad_file_is_one_line_that_starts_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for what, content in bad_plan_files(200):
        path.write_bytes(content)
        with pytest.raises(InvalidPlan) as caught:
            Plan.load(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: "), what
        assert len(message.splitlines()) == 1, (what, message)
        assert len(message) < 400, (what, message)


def test_a_mistake_names_the_key_the_value_and_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('precision = "fp4"\n')
    with pytest.raises(InvalidPlan, match="precision = 'fp4': must be one of fp32, bf16, fp16, fp8, native"):
        Plan.load(path)
    path.write_text("stratgy = 'fsdp'\n")
    with pytest.raises(InvalidPlan, match="unknown key 'stratgy'; did you mean strategy"):
        Plan.load(path)


def test_a_plan_that_cannot_be_saved_leaves_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="cannot be written"):
        Plan().save(tmp_path / "no" / "such" / "plan.toml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidPlan, match="cannot be written"):
        Plan().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_mesh_is_saved_as_a_table(tmp_path: Path) -> None:
    Plan(mesh=Mesh(replicate=2, shard=4)).save(tmp_path / "plan.toml")
    assert "[mesh]\nreplicate = 2\nshard = 4\n" in (tmp_path / "plan.toml").read_text()


def test_recompute_is_chosen_by_pattern_and_never_for_the_root() -> None:
    plan = Plan(recompute="full", recompute_overrides={"blocks.*": "selective", "blocks.1": "none"})
    names = ["(root)", "blocks.0", "blocks.1", "head"]
    assert [plan.recompute_of(name) for name in names] == ["none", "selective", "none", "full"]
    with pytest.raises(InvalidPlan, match=r"recompute_overrides\.blocks\.\* matches no unit"):
        plan.placements(["(root)", "head"])


def test_what_lies_in_a_module_that_is_kept_in_fp32_is_kept() -> None:
    plan = Plan(precision="bf16", keep_fp32=("head", "*.norm?"))
    kept = ["head", "head.weight", "head.mlp.weight", "blocks.0.norm1", "blocks.0.norm1.weight"]
    assert all(plan.keeps_fp32(path) for path in kept)
    assert not any(plan.keeps_fp32(path) for path in ["headless.weight", "blocks.0.norm.weight", "blocks.0", ""])


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, "01"),
        ({"capture": "off"}, ""),
        ({"engine": "torch"}, ""),
        ({"uncaptured": ["blocks.0"]}, "1"),
        ({"offload_states": True}, "01"),
        ({"offload_activations": ["blocks.0"]}, ""),
        ({"update": "backward"}, ""),
    ],
)
def test_units_are_graphs_where_nothing_runs_between_their_kernels(settings: dict[str, object], blocks: str) -> None:
    plan = Plan(**{"strategy": "fsdp", **settings})  # type: ignore[arg-type]
    assert "".join(number for number in "01" if plan.may_capture(f"blocks.{number}")) == blocks
    assert plan.captures == bool(blocks)


def test_earlier_words_for_capture_mean_the_same_or_name_the_new_way(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    for word, meaning in (('"units"', "auto"), ("false", "off")):
        file.write_text(f"capture = {word}\n")
        assert Plan.load(file).capture == meaning
    for word, shown in (('"on"', "'on'"), ("true", "True")):
        file.write_text(f"capture = {word}\n")
        with pytest.raises(InvalidPlan) as caught:
            Plan.load(file)
        assert str(caught.value) == (
            f"{file}: capture = {shown} is gone: capture = 'auto' runs units as CUDA graphs in any loop, "
            "nothing else is needed"
        )
    with pytest.raises(InvalidPlan, match="shardwise.capture is gone: units run as CUDA graphs in any loop"):
        shardwise.capture  # noqa: B018


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "without a mesh: give nodes × ranks per node, such as Mesh(replicate=2, shard=8) in a plan or --mesh 2x8"),
        (
            {"mesh": Mesh(shard=8)},
            "its replicate axis has one rank; give a longer one, such as Mesh(replicate=2, shard=4)",
        ),
        ({"strategy": "zero1", "mesh": Mesh(replicate=2, shard=4)}, "leave across out and set mesh = Mesh(shard=8)"),
        ({"mesh": Mesh(replicate=2), "offload_states": True}, "leave one of them out"),
        ({"mesh": Mesh(replicate=2), "owned": ("*",)}, "leave one of them out"),
        ({"mesh": Mesh(replicate=2), "engine": "torch"}, "engine = 'torch' has no across"),
    ],
    ids=str,
)
def test_a_strategy_across_nothing_is_one_line_with_the_mesh_to_give(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        Plan(across="zero2", **keys)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
