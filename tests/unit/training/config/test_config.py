import os
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.files.keys import reference
from shardwise.doors.cli.app import main
from shardwise.plan import Plan
from shardwise.training.config.config import SECTIONS, TrainConfig, load_config
from shardwise.training.config.config_section import InvalidConfig
from shardwise.training.config.config_sections import OPTIMIZERS

LEAST = """
[task]
model = "gpt-tiny"
dataset = "stdlib"

[plan]
micro_batch = 2

[train]
steps = 5
"""
EXAMPLES = Path(__file__).parents[4] / "examples"
DOCS = Path(__file__).parents[4] / "docs" / "train.md"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.toml"
    path.write_text(LEAST)
    return path


def test_what_is_left_out_has_a_default_and_the_folder_the_files_name(path: Path) -> None:
    config = load_config(path)
    assert config.folder == Path("runs/gpt")
    assert config.plan == Plan(micro_batch=2)
    assert config.optimizer.name == "adamw"
    assert config.optimizer.options() == {}
    assert config.train.steps == 5
    assert config.train.epochs is None


def test_the_resolved_config_is_a_config_and_says_the_same(path: Path, tmp_path: Path) -> None:
    settings = ["optimizer.betas=[0.9, 0.95]", 'plan.overrides."blocks.*"=ddp', "plan.mesh.shard=4", "data.workers=2"]
    config = load_config(path, settings=settings)
    config.save(tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("plan.strategy=zero1", "plan", "strategy", "zero1"),
        ('plan.strategy="zero1"', "plan", "strategy", "zero1"),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.lr = 1", "optimizer", "lr", 1.0),
        ("train.deterministic=true", "train", "deterministic", True),
        ("task.model=python:a.py:f", "task", "model", "python:a.py:f"),
        ("task.dataset=tokens:/data/a=b", "task", "dataset", "tokens:/data/a=b"),
        ("task.dataset=", "task", "dataset", None),
        ("plan.keep_fp32=['head']", "plan", "keep_fp32", ("head",)),
    ],
)
def test_set_changes_one_key(path: Path, setting: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(load_config(path, settings=[setting]), section), key) == value


def test_steps_give_way_to_epochs_when_they_are_left_out(path: Path) -> None:
    config = load_config(path, settings=["train.steps=", "train.epochs=3"])
    assert (config.train.steps, config.train.epochs) == (None, 3)


def test_a_plan_replaces_the_configs_then_the_strategy_then_settings(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(strategy="zero1", precision="bf16", micro_batch=7)
    plan.save(tmp_path / "plan.toml")
    assert load_config(path, plan=tmp_path / "plan.toml").plan == plan
    both = load_config(path, plan=tmp_path / "plan.toml", strategy="ddp", settings=["plan.micro_batch=3"], folder="x")
    assert both.plan == Plan(strategy="ddp", precision="bf16", micro_batch=3)
    assert both.folder == Path("x")
    path.write_text(LEAST.replace("micro_batch = 2", 'file = "plan.toml"\nmicro_batch = 9'))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfig, match=f"{tmp_path}/elsewhere/plan.toml"):
        load_config(path)
    monkeypatch.chdir(tmp_path)
    assert load_config(path).plan == Plan(strategy="zero1", precision="bf16", micro_batch=9)


MISTAKES = {
    "train.stpes=3": "unknown key train.stpes; did you mean train.steps?",
    "trian.steps=3": "unknown key [trian]; did you mean [train]?",
    "train.steps=0": "train.steps = 0: must be a whole number of at least 1",
    "train.steps=1.5": "train.steps = 1.5: must be a whole number of at least 1",
    "train.steps=many": "train.steps = 'many': must be a whole number of at least 1",
    "train.steps=true": "train.steps = True: must be a whole number of at least 1",
    "train.steps=": "train.steps or train.epochs must say how long: neither is given",
    "train.epochs=1": "train.steps or train.epochs must say how long: both are given",
    "train.seed=99999999999": "train.seed = 99999999999: must be a whole number of at least 0 and at most 4,294,967,295",
    "train.clip_norm=nan": "train.clip_norm = nan: must be a number of at least 0",
    "train.compile=inductor": "train.compile is plan.compile now: move the key to [plan]",
    "plan.compile=yes": "plan.compile = 'yes': must be one of none, inductor, aot_eager, auto",
    "train.deterministic=1": "train.deterministic = 1: must be true or false",
    "optimizer.name=lamb": "optimizer.name = 'lamb': must be one of adamw, adam, nadam, radam, adagrad, rmsprop, sgd, muon",
    "optimizer.lr=0": "optimizer.lr = 0: must be a number above 0",
    "optimizer.lr=inf": "optimizer.lr = inf: must be a number above 0",
    "optimizer.betas=0.9": "optimizer.betas = 0.9: must be two numbers of at least 0 and below 1",
    "optimizer.betas=[0.9, 1]": "optimizer.betas = [0.9, 1]: must be two numbers of at least 0 and below 1",
    "optimizer.momentum=0.9": "optimizer.momentum = 0.9: adamw has no momentum, only rmsprop, sgd, muon",
    "schedule.name=cosin": "schedule.name = 'cosin': must be one of constant, linear, cosine",
    "schedule.final_ratio=2": "schedule.final_ratio = 2: must be a number of at least 0 and at most 1",
    "plan.strategy=fdsp": "plan.strategy = 'fdsp': must be one of ddp, zero1, zero2, shard_grad_op, fsdp, auto",
    "plan.stratgy=ddp": "[plan]: unknown key 'stratgy'; did you mean strategy?",
    "plan.update=backward": "plan.update = 'backward': gradients are used before their norm is known; set train.clip_norm = 0 and train.nonfinite to stop or warn",
    "plan.update=auto": "plan.update = 'auto': gradients are used before their norm is known; set train.clip_norm = 0 and train.nonfinite to stop or warn",
    "plan.micro_batch=0": "plan.micro_batch = 0: must be a whole number of at least 1",
    "plan.micro_batch=": "plan.micro_batch is missing: samples per rank per pass",
    "task.model=": "task.model is missing: a name of `shardwise models`, hf:DIR (a checkpoint to fine-tune), or python:FILE.py:function",
    "task.model=7": "task.model = 7: must be a text",
    "checkpoint.keep=0": "checkpoint.keep = 0: must be a whole number of at least 1",
    "run.device=tpu": "run.device = 'tpu': must be one of auto, cpu, cuda",
    "steps=3": "--set 'steps=3': must be section.key=value",
    "train.steps": "--set 'train.steps': must be section.key=value",
    "=3": "--set '=3': must be section.key=value",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_a_mistake_is_one_line_with_the_file_the_key_and_what_is_allowed(path: Path, setting: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, settings=[setting])
    assert str(caught.value) == f"{path}: {MISTAKES[setting]}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[task", "is not TOML"),
        (b"\xff", "is not text in UTF-8 (byte 0)"),
        (b"task = 3", "task = 3: must be a table, [task]"),
        (b"plan = 3\n[task]\nmodel='x'\n[train]\nsteps=1", "plan = 3: must be a table, [plan]"),
        (b"run = 3\n[task]\nmodel='x'\n[train]\nsteps=1", "run = 3: must be a table, [run]"),
        (b'[task]\nmodel = "x"\n"a\\nb" = 3', "unknown key 'task.a\\nb'"),
        (b'[task]\nmodel = "a\\nb"', "task.model = 'a\\nb': must be a text"),
        (b"[plan]\nfile = 3", "plan.file = 3: must be the path of a plan"),
        (b"[plan]\nfile = 'none.toml'", "none.toml: cannot be read"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="none.toml: cannot be read"):
        load_config(tmp_path / "none.toml")


@pytest.mark.timeout(20)
def test_what_is_no_file_of_a_config_is_not_read(tmp_path: Path) -> None:
    zeros, pipe = tmp_path / "zeros.toml", tmp_path / "pipe.toml"
    with zeros.open("wb") as file:
        file.truncate(2**40)
    os.mkfifo(pipe)
    with pytest.raises(InvalidConfig, match="zeros.toml: cannot be read .is larger than 4,194,304 bytes"):
        load_config(zeros)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InvalidConfig, match="cannot be read .is not a regular file"):
            load_config(path)


def test_sections_made_by_hand_are_checked_as_well() -> None:
    with pytest.raises(InvalidConfig, match="checkpoint.every = -1"):
        SECTIONS["checkpoint"](every=-1)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_a_config(example: Path) -> None:
    assert isinstance(load_config(example), TrainConfig)


def test_the_config_of_the_docs_is_one_and_keys_lists_every_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"```toml\n(\[task\]\nmodel = \"gpt2-124m\".*?)```", DOCS.read_text(), flags=re.DOTALL)
    (tmp_path / "shown.toml").write_text(shown)
    assert load_config(tmp_path / "shown.toml").train.steps == 10000
    with pytest.raises(SystemExit):
        main(["train", "--keys"])
    printed = capsys.readouterr().out
    for name, section in SECTIONS.items():
        assert f"[{name}]" in printed
        for key, _, what in reference(section):
            assert f"  {key} (" in printed
            assert what in printed


def test_every_optimizer_of_the_config_is_made_with_its_options() -> None:
    from torch import nn

    from shardwise.training.config.config_sections import OptimizerSection
    from shardwise.training.loop.optimizers import make_optimizer

    values = {"betas": (0.8, 0.9), "eps": 1e-3, "momentum": 0.5, "nesterov": True, "fused": False}
    for name, options in OPTIMIZERS.items():
        if name == "muon":
            # Of two kinds (test_muon.py).
            continue
        given = {option: values[option] for option in options}
        optimizer = make_optimizer(nn.Linear(2, 2), OptimizerSection(name=name, lr=0.1, weight_decay=0.2, **given))
        assert type(optimizer).__name__.lower() == name
        matrices, vectors = optimizer.param_groups
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
        assert all(matrices[option] == value for option, value in given.items())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["task.quantize=nf4"], "task.quantize: task.model = 'gpt-tiny' is not hf:DIR"),
        (["task.model=hf:base", "task.quantize=nf4"], "task.quantize = 'nf4' needs task.lora"),
        (["task.model=hf:base", "task.lora=4", "task.quantize=int3"], "task.quantize = 'int3'"),
        (
            ["task.model=hf:base", "task.lora=4", "task.quantize=nf4", "plan.precision=fp8"],
            "set plan.precision = 'bf16'",
        ),
    ],
)
def test_a_quantised_base_that_cannot_be_trained_is_one_line(path: Path, settings: list[str], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(expected)):
        load_config(path, settings=settings)
