"""Planted mistakes are named, and nothing is found in healthy setups."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from setups import ACCELERATE, DEEPSPEED, HEALTHY, LIGHTNING, PLANTED, TORCHTITAN, TRAINER, changed

from shardwise.base.errors import InvalidPlan
from shardwise.doors.cli.app import main
from shardwise.doors.interchange.check_setup import check_setup
from shardwise.doors.interchange.mistakes import TITLES
from shardwise.doors.interchange.recognise import read_setup
from shardwise.plan import Plan

ROOT = Path(__file__).resolve().parents[4]


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


_AT_LEAST_1 = "write an integer of at least 1"
_WRONG: list[tuple[dict[str, Any], str]] = [
    (changed(DEEPSPEED, zero_optimization__stage="3"), 'stage is "3" (a string); write 0, 1, 2 or 3'),
    (changed(DEEPSPEED, zero_optimization__stage=7), "zero_optimization.stage is 7; write 0, 1, 2 or 3"),
    (changed(DEEPSPEED, zero_optimization__stage=True), "zero_optimization.stage is true; write 0, 1, 2 or 3"),
    (changed(DEEPSPEED, zero_optimization__stage=float("inf")), "stage is Infinity; write 0, 1, 2 or 3"),
    (changed(DEEPSPEED, zero_optimization__stage={"of": 3}), "zero_optimization.stage is a table; write"),
    (changed(DEEPSPEED, zero_optimization__stage={}), "zero_optimization.stage is a table; write"),
    (changed(DEEPSPEED, zero_optimization=[1]), "zero_optimization is a list; write a table"),
    (changed(DEEPSPEED, bf16__enabled="perhaps"), 'bf16.enabled is "perhaps" (a string); write true or false'),
    (changed(DEEPSPEED, bf16=3), "bf16 is 3; write a table"),
    (changed(DEEPSPEED, train_batch_size=64.5), f"train_batch_size is 64.5; {_AT_LEAST_1}"),
    (changed(DEEPSPEED, gradient_accumulation_steps=0), f"gradient_accumulation_steps is 0; {_AT_LEAST_1}"),
    (changed(DEEPSPEED, train_batch_size=2**80), "train_batch_size is an integer of more than 64 bits"),
    (changed(DEEPSPEED, communication_data_type="fp12"), 'is "fp12" (a string); write FP16, BFP16, BF16 or FP32'),
    (changed(DEEPSPEED, fp16={"loss_scale": "x" * 99}), f'fp16.loss_scale is "{"x" * 59}… (a string); write a number'),
    (changed(DEEPSPEED, zero_optimization__offload_optimizer={"device": "gpu"}), "write NONE, CPU or NVME"),
    (changed(ACCELERATE, fsdp_config=3), "fsdp_config is 3; write a table"),
    (changed(ACCELERATE, fsdp_config__fsdp_version=3), "fsdp_config.fsdp_version is 3; write 1 or 2"),
    (changed(ACCELERATE, fsdp_config__fsdp_reshard_after_forward=[1]), "fsdp_reshard_after_forward is a list; write"),
    (changed(ACCELERATE, fsdp_config__fsdp_auto_wrap_policy="ALL"), 'is "ALL" (a string); write TRANSFORMER_BASED'),
    (changed(ACCELERATE, fsdp_config__fsdp_transformer_layer_cls_to_wrap=5), "is 5; write names of classes"),
    (changed(ACCELERATE, mixed_precision="bf17"), 'mixed_precision is "bf17" (a string); write NO,'),
    (changed(ACCELERATE, num_processes="many"), f'num_processes is "many" (a string); {_AT_LEAST_1}'),
    (changed(ACCELERATE, num_machines=-1), f"num_machines is -1; {_AT_LEAST_1}"),
    (changed(ACCELERATE, distributed_type=["FSDP"]), "distributed_type is a list; write a word"),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "2"}},
        'deepspeed_config.zero_stage is "2" (a string); write 0, 1, 2 or 3',
    ),
    (changed(LIGHTNING, trainer__precision="8bit"), 'precision is "8bit" (a string); write'),
    (changed(LIGHTNING, trainer__devices=float("inf")), f"devices is Infinity; {_AT_LEAST_1}"),
    (changed(LIGHTNING, trainer__strategy="deepspeed_stage_9"), 'strategy is "deepspeed_stage_9" (a string); write'),
    (changed(LIGHTNING, trainer__strategy=3), "strategy is 3; write a word"),
    (changed(TORCHTITAN, parallelism__data_parallel_shard_degree=0), f"data_parallel_shard_degree is 0; {_AT_LEAST_1}"),
    (changed(TORCHTITAN, training__dtype=16), "training.dtype is 16; write FLOAT32, BFLOAT16 or FLOAT16"),
    (changed(TORCHTITAN, activation_checkpoint__mode="half"), 'activation_checkpoint.mode is "half" (a string)'),
    (changed(TRAINER, fsdp="full_shart"), 'fsdp is "full_shart" (a string); write some of full_shard,'),
    (changed(TRAINER, fsdp=[["full_shard"]]), "fsdp is a list; write some of full_shard,"),
    (changed(TRAINER, fsdp=None, deepspeed={"zero_optimization": {"stage": "3"}}), "zero_optimization.stage is"),
    (changed(TRAINER, per_device_train_batch_size="4"), f'is "4" (a string); {_AT_LEAST_1}'),
]


@pytest.mark.parametrize(("setup", "line"), _WRONG, ids=range(len(_WRONG)))
def test_a_value_that_the_tool_cannot_take_is_a_line_not_a_default(
    setup: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (finding,) = check_setup(read_setup(written(setup, tmp_path)))
    assert finding.code == "SW115"
    assert line in str(finding)
    assert "\n" not in str(finding)


@pytest.mark.parametrize(
    "setup",
    [
        changed(DEEPSPEED, train_batch_size="auto", gradient_accumulation_steps="auto", bf16__enabled="auto"),
        changed(DEEPSPEED, bf16__enabled="True", fp16={"enabled": False, "loss_scale": 0.0}),
        changed(ACCELERATE, distributed_type=False, mixed_precision=False),
        changed(ACCELERATE, fsdp_config__fsdp_offload_params="no"),
        changed(LIGHTNING, trainer__devices="0,1", trainer__precision=16),
        changed(LIGHTNING, trainer__devices=-1, trainer__strategy="deepspeed_stage_3_offload"),
        changed(LIGHTNING, trainer__strategy__init_args__auto_wrap_policy={"class_path": "a.Policy"}),
        changed(TORCHTITAN, training__global_batch_size=-1, parallelism__data_parallel_shard_degree=-1),
        changed(TRAINER, fsdp_config="fsdp.json"),
        changed(TRAINER, fsdp=None, deepspeed="ds.json"),
    ],
)
def test_the_ways_in_which_tools_write_a_value_are_read(setup: dict[str, Any], tmp_path: Path) -> None:
    assert check_setup(read_setup(written(setup, tmp_path))) == []


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
    ],
)
def test_what_is_no_setup_is_one_line(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
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

    def test_a_wrong_value_is_shown_alone_and_makes_no_plan(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path, out = written(PLANTED["a stage in quotes"][1], tmp_path), tmp_path / "plan.toml"
        with pytest.raises(SystemExit) as ended:
            main(["doctor", str(path), "--model", "llama-3.1-8b", "--cluster", "8xh100-80gb"])
        assert ended.value.code == 1
        said = 'zero_optimization.stage is "3" (a string); write 0, 1, 2 or 3'
        assert capfd.readouterr().out == (f"SW115 a value that the tool cannot take: {said} (docs/doctor.md#sw115)\n")
        with pytest.raises(SystemExit) as ended:
            main(["import", str(path), "--out", str(out)])
        assert ended.value.code == 2
        assert capfd.readouterr().err == f"InvalidPlan: {path}: {said}\n"
        assert not out.exists()

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
