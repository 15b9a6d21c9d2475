"""The pictures show what the program does, in 80 columns, and the numbers in them follow from formulas."""

from dataclasses import replace

import pytest

from shardwise.measure.report.snapshots import STATES, Holding, StepSnapshots, snapshots_of
from shardwise.measure.report.text.step_picture import GLYPHS, OTHER_NAMES, explain, explain_as_data, picture_model
from shardwise.models.specs.spec_store import ready_spec
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS, SHARDED, STRATEGIES, Mesh, placement_of
from shardwise.program import Kind, build
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

PICTURE = picture_model()
UNIT = 16  # MiB of each of its 4 units
MIB = 2**20


def plan(strategy: str, *, num_ranks: int = 4, prefetch: int = 1) -> Plan:
    return Plan(strategy=strategy, mesh=Mesh(shard=num_ranks), prefetch=prefetch)


def snapshots(strategy: str, *, num_ranks: int = 4) -> StepSnapshots:
    return snapshots_of(PICTURE, plan=plan(strategy, num_ranks=num_ranks), num_ranks=num_ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 16, 1000])
def test_a_step_fits_on_a_screen(strategy: str, num_ranks: int) -> None:
    lines = explain(PICTURE, plan=plan(strategy, num_ranks=num_ranks))
    assert len(lines) <= 64
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)


@pytest.mark.parametrize("model", ["gpt-tiny", "gpt2-124m", "llama-3.1-405b", "vit-large", "resnet18", "resnet50"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_large_model_is_shortened_but_its_peak_is_drawn(strategy: str, model: str) -> None:
    spec = ready_spec(model, ways=())
    assert spec is not None
    lines = explain(spec, plan=plan(strategy, num_ranks=1024))
    assert len(lines) <= 80
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.endswith("◀") for line in lines) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_operation_is_a_line_in_the_programs_order(strategy: str) -> None:
    """But for the copies into buckets. Buckets are named shortly, so for those the verb alone is compared."""
    lines = explain(PICTURE, plan=plan(strategy))
    first = next(index for index, line in enumerate(lines) if line.startswith("(the step begins)"))
    drawn = [line[:31].strip() for line in lines[first + 1 : lines.index("", first)] if not line.startswith("──")]
    operations = build(PICTURE, plan=Plan(strategy=strategy)).operations()
    expected = [operation for operation in operations if operation.kind is not Kind.TAKE_GRADS]
    assert len(drawn) == len(expected)
    for text, operation in zip(drawn, expected, strict=True):
        if "+" in operation.subject:
            assert text.startswith(operation.kind.value)
        else:
            assert text == str(operation)


def test_fsdp_holds_one_unit_ahead_of_the_one_that_computes() -> None:
    """█ whole, ▂ own slice, ░ arriving: the root, block 0 and block 1 while block 0 computes."""
    lines = explain(PICTURE, plan=plan("fsdp", prefetch=1))
    (line,) = [line for line in lines if line.startswith(" forward blocks.0")]
    assert line.split()[2:] == ["█", "█", "░", "▂", *"····", *"▂▂▂▂", "96.0", "████████"]
    lines = explain(PICTURE, plan=plan("fsdp", prefetch=0))
    (line,) = [line for line in lines if line.startswith(" forward blocks.0")]
    assert line.split()[2:6] == ["█", "█", "▂", "▂"]


def test_the_header_shows_which_rank_owns_which_slice() -> None:
    lines = explain(PICTURE, plan=plan("zero2", num_ranks=3))
    start = next(index for index, line in enumerate(lines) if line.split() == list(STATES))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["rank", "0", "███", "█··", "█··"],
        ["rank", "1", "███", "·█·", "·█·"],
        ["rank", "2", "███", "··█", "··█"],
    ]


def test_every_row_of_the_table_has_its_other_names_and_every_state_its_glyph() -> None:
    assert set(OTHER_NAMES) == {placement_of(name, across=across) for name in STRATEGIES for across in ACROSS}
    assert set(GLYPHS) == set(Holding)
    assert len(set(GLYPHS.values())) == len(GLYPHS)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_held_bytes_follow_from_the_placement(num_ranks: int) -> None:
    """In MiB; 4 units of params, 4 of grads, 8 of optim. `slice` is a unit's share of one rank."""
    whole, slice_ = 4 * UNIT, UNIT / num_ranks
    between = {
        "ddp": 3 * whole,
        "zero1": whole + 8 * slice_,
        "zero2": whole + 8 * slice_,
        "shard_grad_op": 12 * slice_,
        "fsdp": 12 * slice_,
    }
    peaks = {
        "ddp": between["ddp"] + whole,
        "zero1": between["zero1"] + whole,
        # In backward of block 0: the grads of the root, of it, and of one in flight; a slice of one.
        "zero2": between["zero2"] + 3 * UNIT + slice_,
        # In backward of block 2: all params gathered; the grads of the root and of it.
        "shard_grad_op": between["shard_grad_op"] + 4 * UNIT + 2 * UNIT,
        # In backward of block 1: the root, it and block 0 gathered; grads of the root, of it, and of one in flight.
        "fsdp": between["fsdp"] + 3 * UNIT + 3 * UNIT,
    }
    for strategy in STRATEGIES:
        held = snapshots(strategy, num_ranks=num_ranks)
        assert held.snapshots[0].held_bytes == between[strategy] * MIB, strategy
        assert held.peak.held_bytes == peaks[strategy] * MIB, strategy


@pytest.mark.parametrize("reduces_in_flight", [1, 3])
@pytest.mark.parametrize("mesh", [Mesh(shard=4), Mesh(replicate=2, shard=4)], ids=str)
def test_gradients_in_pieces_are_on_their_way_until_the_last_one_is_there(mesh: Mesh, reduces_in_flight: int) -> None:
    cut = Plan(strategy="zero2", piece_bytes=UNIT * MIB // 4, mesh=mesh, reduces_in_flight=reduces_in_flight)
    found, whole = (
        snapshots_of(PICTURE, plan=one, num_ranks=mesh.num_ranks) for one in (cut, replace(cut, piece_bytes=0))
    )
    assert found.sent_bytes(Kind.REDUCE) == whole.sent_bytes(Kind.REDUCE)
    assert found.snapshots[-1].holds == whole.snapshots[-1].holds
    on_its_way = [snapshot.holds["grads"]["blocks.2"] is Holding.ON_ITS_WAY for snapshot in found.snapshots]
    first, last = on_its_way.index(True), len(on_its_way) - on_its_way[::-1].index(True)
    assert all(on_its_way[first:last])
    wait = "wait slice" if mesh.replicate > 1 else "wait reduce"
    assert [str(found.snapshots[at].operation) for at in (first, last)] == [
        "reduce blocks.2 1/4",
        f"{wait} blocks.2 4/4",
    ]
    drawn = [line.split()[2] for line in explain(PICTURE, plan=cut) if line.startswith("   reduce blocks.2 ")]
    assert drawn == ["1/4", "4/4"]


def test_sent_bytes_are_those_of_a_ring() -> None:
    """(n-1)/n of all that is gathered or reduce-scattered, twice that of what is all-reduced."""
    model = 4 * UNIT * MIB
    gathers = {"ddp": 0, "zero1": model, "zero2": model, "shard_grad_op": model}
    # The root and the last block are gathered once, the others for forward and for backward.
    gathers["fsdp"] = 2 * model - 2 * UNIT * MIB
    reduces = {"ddp": 2 * model, "zero1": 2 * model, "zero2": model, "shard_grad_op": model, "fsdp": model}
    for strategy in STRATEGIES:
        held = snapshots(strategy, num_ranks=4)
        assert held.sent_bytes(Kind.GATHER) == gathers[strategy] * 3 / 4, strategy
        assert held.sent_bytes(Kind.REDUCE) == reduces[strategy] * 3 / 4, strategy
        assert snapshots(strategy, num_ranks=1).sent_bytes(Kind.REDUCE) == 0


def test_on_a_hybrid_mesh_gathers_stay_in_a_group_and_slices_go_from_one_to_another() -> None:
    """The slice that a rank sends on is a quarter; of 2 groups an all-reduce sends each of its bytes once."""
    model = 4 * UNIT * MIB
    mesh = Mesh(replicate=2, shard=4)
    for strategy in STRATEGIES:
        hybrid = snapshots_of(PICTURE, plan=Plan(strategy=strategy, mesh=mesh), num_ranks=8)
        alone = snapshots(strategy, num_ranks=4)
        sharded = STRATEGIES[strategy].grads is SHARDED
        assert hybrid.sent_bytes(Kind.GATHER) == alone.sent_bytes(Kind.GATHER), strategy
        assert hybrid.sent_bytes(Kind.REDUCE) == (model * 3 / 4 if sharded else 2 * model * 7 / 8), strategy
        assert hybrid.sent_bytes(Kind.REDUCE_SLICE) == (model / 4 if sharded else 0), strategy
        assert hybrid.snapshots[0].held_bytes == alone.snapshots[0].held_bytes, strategy
        assert hybrid.snapshots[-1].held_bytes == alone.snapshots[-1].held_bytes, strategy


def test_on_a_hybrid_mesh_a_slice_is_drawn_on_its_way_until_it_is_waited_for() -> None:
    lines = explain(PICTURE, plan=Plan(strategy="fsdp", mesh=Mesh(replicate=2, shard=4)))
    assert "8 ranks in 2 groups; what each has of every unit, in 4 slices, at the update:" in lines
    assert [line.split()[2] for line in lines if line.startswith("  rank")] == ["█···", "·█··", "··█·", "···█"] * 2
    (sent,) = [index for index, line in enumerate(lines) if line.startswith("   reduce slice blocks.2")]
    (there,) = [index for index, line in enumerate(lines) if line.startswith("   wait slice blocks.2")]
    assert sent < there
    # The last of the four columns of grads; between, other operations are drawn.
    grads = [line[31 + 9 : 31 + 16] for line in lines[sent - 1 : there + 1] if not line.startswith("──")]
    assert [cells[-1] for cells in grads] == ["░"] * (len(grads) - 1) + ["▂"]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_ends_as_the_next_begins_but_for_the_grads(strategy: str) -> None:
    found = snapshots(strategy).snapshots
    first, last = found[0].holds, found[-1].holds
    assert {state: last[state] for state in ("params", "optim")} == {
        state: first[state] for state in ("params", "optim")
    }
    assert set(first["grads"].values()) == {Holding.NOTHING}
    assert Holding.NOTHING not in last["grads"].values()


def test_frozen_units_have_no_gradients_and_no_optimizer_state() -> None:
    frozen = UnitSpec(name="frozen", class_name="Block", params=(TensorSpec(name="f", shape=(8,), trainable=False),))
    root = UnitSpec(name=ROOT, class_name="Net", params=(TensorSpec(name="r", shape=(8,)),))
    spec = ModelSpec(name="frozen", units=(root, frozen), call_order=(ROOT, "frozen"))
    held = snapshots_of(spec, plan=Plan(strategy="ddp"), num_ranks=2)
    assert held.peak.held_bytes == 4 * (8 + 8 + 8 + 2 * 8)
    assert {frame.holds["grads"]["frozen"] for frame in held.snapshots} == {Holding.NOTHING}


def test_the_data_holds_the_programs_rows() -> None:
    data = explain_as_data(PICTURE, plan=plan("fsdp"))
    program = build(PICTURE, plan=Plan(strategy="fsdp"))
    assert [(row["trigger"], row["unit"], row["call"]) for row in data["rows"]] == [
        (row.trigger.value, row.unit, row.call) for row in program.rows
    ]
    operations = [operation for row in data["rows"] for operation in row["operations"]]
    assert [(op["kind"], op["subject"], op["num_bytes"]) for op in operations] == [
        (op.kind.value, op.subject, op.num_bytes) for op in program.operations()
    ]
    assert max(op["held_bytes"] for op in operations) == data["peak_bytes"] == 144 * MIB
    assert operations[0]["params"] == {ROOT: "on its way", **{f"blocks.{i}": "own slice" for i in range(3)}}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_is_alone_computes_with_whole_parameters(strategy: str) -> None:
    lines = explain(PICTURE, plan=plan(strategy, num_ranks=1))
    assert "1 rank: its slice of a unit is all of it, and nothing is sent" in lines
    computes = [line for line in lines if line.startswith((" forward ", " backward "))]
    for number, line in enumerate(computes):
        params = line[31:].split()[:4]
        unit = 0 if "(root)" in line else 1 + int(line.split()[1].rpartition(".")[2])
        assert params[unit] == "█", (number, line)
