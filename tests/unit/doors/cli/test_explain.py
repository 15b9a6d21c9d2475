import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.doors.cli.app import main
from shardwise.models.tasks.load_task import load_task
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.program.units import unit_modules

DOCUMENT = Path(__file__).parents[4] / "docs" / "ddp-or-fsdp.md"


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def output(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_code(*arguments) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_is_explained(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    lines = output(capfd, "explain", strategy, "--ranks", "2").splitlines()
    assert lines[0].startswith(f"{strategy}, also known as ")
    assert "  rank 1" in [line[:8] for line in lines]
    assert "\x1b" not in "".join(lines), "colours are for terminals"


def test_ring_is_asked_for_in_three_ways(capfd: pytest.CaptureFixture[str]) -> None:
    expected = output(capfd, "explain", "ring", "--ranks", "3")
    assert output(capfd, "explain", "--ring", "--ranks", "3") == expected
    assert output(capfd, "explain", "fsdp", "--ring", "--ranks", "3") == expected


def test_json_is_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capfd, "explain", "zero2", "--model", "gpt-tiny", "--prefetch", "2", "--json"))
    assert (data["model"], data["strategy"], data["ranks"], data["prefetch"]) == ("gpt-tiny", "zero2", 4, 2)
    assert data["rows"][0]["operations"][0]["kind"] == "wait gather"
    assert len(json.loads(output(capfd, "explain", "ring", "--json"))["rounds"]) == 6


def test_a_hybrid_mesh_has_the_operations_of_its_second_axis(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("explain", "fsdp", "--ranks", "4", "--replicate", "2")
    assert "   wait slice blocks.2 " in output(capfd, *arguments)
    data = json.loads(output(capfd, *arguments, "--json"))
    slices = [op for row in data["rows"] for op in row["operations"] if op["kind"] == "reduce slice"]
    assert (data["replicate"], len(slices), {op["num_bytes"] for op in slices}) == (2, 4, {8 * 2**20})
    assert data["sent_bytes"]["reduce slice"] == 4 * 8 * 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fdsp"], "UnknownName: unknown strategy 'fdsp'; did you mean fsdp or ddp?"),
        (["rings"], "UnknownName: unknown strategy 'rings'; did you mean ring?"),
        (["fsdp", "--ranks", "0"], "InvalidPlan: --ranks 0: must be a whole number of at least 1"),
        (["ring", "--ranks", "-3"], "InvalidPlan: --ranks -3: must be a whole number of at least 1"),
        (["fsdp", "--replicate", "3"], "InvalidPlan: --replicate 3: must be a whole number that divides the 4 ranks"),
        (["fsdp", "--replicate", "0"], "InvalidPlan: --replicate 0: must be a whole number that divides the 4 ranks"),
        (["fsdp", "--prefetch", "-1"], "InvalidPlan: prefetch = -1: must be a whole number of at least 0"),
        (["fsdp", "--model", "gpt2-125m"], "UnknownName: unknown model 'gpt2-125m'; did you mean"),
        (["fsdp", "--units", "leaf"], "InvalidPlan: units = 'leaf': name the model that is cut with --model"),
        ([], "InvalidPlan: explain needs a strategy: ddp, zero1, zero2, shard_grad_op, fsdp, ring"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("explain", *arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_explain_imports_no_torch() -> None:
    code = (
        "import sys; from shardwise.doors.cli.app import main\n"
        "try: main(['explain', 'fsdp', '--model', 'resnet18'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def shown_in(document: str) -> list[tuple[list[str], list[str]]]:
    """(arguments, lines) of every `$ shardwise …` block; a line ⋮ stands for some that are left out."""
    blocks = [block.splitlines()[1:] for block in document.split("```")[1::2]]
    return [(lines[0].split()[2:], lines[1:]) for lines in blocks if lines[0].startswith("$ shardwise ")]


def test_what_the_document_shows_is_what_the_commands_print(capfd: pytest.CaptureFixture[str]) -> None:
    blocks = shown_in(DOCUMENT.read_text(encoding="utf-8"))
    assert {arguments[1] for arguments, _ in blocks} >= {"ddp", "fsdp", "ring"}
    for arguments, shown in blocks:
        printed = output(capfd, *arguments).splitlines()
        position = 0
        for before, line in pairwise(["", *shown]):
            if line == "⋮":
                continue
            if before == "⋮":
                assert line in printed[position:], (arguments, line)
                position = printed.index(line, position)
            assert printed[position] == line, arguments
            position += 1


def test_other_units_are_those_of_the_model_that_is_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    units = "class:Block + head"
    plan = Plan(units=units)
    plan.save(tmp_path / "plan.toml")
    shown = json.loads(output(capfd, "explain", str(tmp_path / "plan.toml"), "--model", "gpt-tiny", "--json"))
    names = list(unit_modules(load_task("gpt-tiny", device="meta").model, policy=plan.units))
    assert [unit["name"] for unit in shown["units"]] == names
    assert "head" in names
    drawn = output(capfd, "explain", "fsdp", "--model", "gpt-tiny", "--units", units)
    assert f" gpt-tiny ({len(names)} units, " in drawn


def test_a_plan_with_owned_parameters_shows_them_move(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('strategy = "fsdp"\nowned = ["*"]\n')
    lines = output(capfd, "explain", str(plan), "--ranks", "2").splitlines()
    moves = [line.split()[0:3] for line in lines if " owners " in line and "MiB" not in line]
    assert ["to", "owners", "(root)"] in moves
    assert ["from", "owners", "blocks.0"] in moves
    # The picture's model has 64 MiB of parameters: of those and their gradients a rank sends half of its half.
    assert any(line.startswith("sent: ") and "to and from owners 48.0" in line for line in lines)
