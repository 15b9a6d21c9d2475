"""Planted mistakes are named, and nothing is found in healthy setups."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from setups import HEALTHY, PLANTED

from shardwise.cli.app import main
from shardwise.errors import InvalidPlan
from shardwise.interchange.check_setup import check_setup
from shardwise.interchange.mistakes import TITLES
from shardwise.interchange.recognise import read_setup
from shardwise.plan import Plan

ROOT = Path(__file__).resolve().parents[3]


def written(setup: dict[str, Any], folder: Path) -> Path:
    """As its tool writes it: DeepSpeed in JSON, torchtitan in TOML, the others in YAML."""
    if "zero_optimization" in setup:
        path, text = folder / "setup.json", json.dumps(setup)
    elif "training" in setup:
        path, text = folder / "setup.toml", tomli_w.dumps(setup)
    else:
        path, text = folder / "setup.yaml", yaml.safe_dump(setup)
    path.write_text(text)
    return path


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_named_with_its_code_and_a_fix(what: str, tmp_path: Path) -> None:
    code, setup = PLANTED[what]
    (finding,) = check_setup(read_setup(written(setup, tmp_path)))
    assert finding.code == code
    assert finding.fix
    assert str(finding).startswith(f"{code} {TITLES[code]}: ")


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_setup(name: str, tmp_path: Path) -> None:
    assert check_setup(read_setup(written(HEALTHY[name], tmp_path))) == []


def test_every_code_is_planted_or_predicted_and_has_its_section_in_the_docs() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    predicted = {"SW104", "SW105", "SW109", "SW111"}
    assert {code for code, _ in PLANTED.values()} | predicted == set(TITLES)
    for code, title in TITLES.items():
        assert f"### {code}" in text
        assert title in text


def test_each_tool_is_read_as_the_plan_that_does_the_same(tmp_path: Path) -> None:
    found = {name: read_setup(written(setup, tmp_path)) for name, setup in HEALTHY.items()}
    assert {name: setup.plan.strategy for name, setup in found.items()} == {
        "accelerate": "fsdp",
        "accelerate ddp": "ddp",
        "deepspeed": "fsdp",
        "lightning": "fsdp",
        "trainer": "fsdp",
        "torchtitan": "fsdp",
    }
    assert found["accelerate"].plan.units == found["trainer"].plan.units == "class:LlamaDecoderLayer"
    assert found["lightning"].plan.units == "class:Block"
    assert found["deepspeed"].num_ranks == found["accelerate"].num_ranks == found["lightning"].num_ranks == 8
    assert str(found["torchtitan"].plan.mesh) == "2×8"
    assert found["torchtitan"].plan.accumulate == 1
    assert all(setup.plan.precision == "bf16" for setup in found.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: [1"),
        ("a.json", "{"),
        ("a.yaml", "just words"),
        ("a.yaml", "colour: green"),
        ("a.yaml", "1: 2"),
        ("a.toml", "x = ["),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 7\nfsdp_config: 3"),
    ],
)
def test_what_is_no_setup_is_one_line_or_a_setup(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    if text.startswith("distributed_type"):
        # A table that is none counts as empty, and then nothing is wrapped.
        assert [finding.code for finding in check_setup(read_setup(path))] == ["SW101"]
        return
    with pytest.raises(InvalidPlan) as raised:
        read_setup(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


class TestCommand:
    def test_findings_are_lines_and_exit_code_1(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path = written(PLANTED["no wrap policy"][1], tmp_path)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", str(path)])
        assert ended.value.code == 1
        assert "SW101 nothing is wrapped" in capfd.readouterr().out

    def test_with_a_model_and_a_cluster_the_planner_speaks(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = written(HEALTHY["accelerate"], tmp_path)
        for options, code in (
            (["--model", "llama-3.1-8b", "--cluster", "8xh100-80gb", "--micro-batch", "64"], "SW104"),
            (["--model", "gpt2-124m", "--cluster", "8xh100-80gb", "--micro-batch", "8", "--seq", "1024"], "SW105"),
        ):
            with pytest.raises(SystemExit) as ended:
                main(["doctor", str(path), *options])
            assert ended.value.code == 1
            assert code in capfd.readouterr().out

    def test_import_makes_a_plan_and_writes_over_nothing(self, tmp_path: Path) -> None:
        path, out = written(HEALTHY["trainer"], tmp_path), tmp_path / "plan.toml"
        with pytest.raises(SystemExit) as ended:
            main(["import", str(path), "--out", str(out)])
        assert ended.value.code == 0
        plan = Plan.load(out)
        assert (plan.strategy, plan.micro_batch, plan.engine) == ("fsdp", 4, "shardwise")
        with pytest.raises(SystemExit) as ended:
            main(["import", str(path), "--out", str(out)])
        assert ended.value.code == 2
