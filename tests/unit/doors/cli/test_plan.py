"""`shardwise plan`, as it is typed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.doors.cli.app import main
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.search.auto import Solved
from shardwise.planner.search.candidates import SpecFor, cost
from shardwise.planner.search.request import AutoRequest


def run(*arguments: str, command: tuple[str, ...] = ("plan",)) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*command, *arguments])
    return int(caught.value.code or 0)


def as_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(*arguments, "--json") == 0
    return json.loads(capfd.readouterr().out)


def test_the_json_is_the_contract(capfd: pytest.CaptureFixture[str]) -> None:
    data = as_json(capfd, "gpt2-124m", "--cluster", "8xh100-80gb")
    assert set(data) == {
        *("model", "cluster", "recommended", "why", "like", "fabric", "software", "host", "candidates"),
        *("captured", "compiled", "ways"),
    }
    assert [candidate["strategy"] for candidate in data["candidates"]] == list(STRATEGIES)
    assert data["candidates"][data["recommended"]]["strategy"] == "ddp"
    for candidate in data["candidates"]:
        assert candidate["fits"] == "yes"
        assert candidate["mesh"] == {"replicate": 1, "shard": 8}
        assert (candidate["seq"], candidate["precision"], candidate["recompute"]) == (1024, "bf16", "none")
        assert set(candidate["peak_bytes"]) == {"allocated", "reserved", "device"}
        assert set(candidate["breakdown_bytes"]) == set(CATEGORIES)
        assert sum(candidate["breakdown_bytes"].values()) == candidate["peak_bytes"]["allocated"]
        assert candidate["error_band"]["memory"] == 0.03
        assert 0 < candidate["error_band"]["time"] < 0.3
        assert candidate["measured"] is None
        assert candidate["comm_bytes_per_step"] > 0
        assert candidate["samples_per_s"] == pytest.approx(8 * candidate["micro_batch"] / candidate["step_seconds"])
        assert candidate["tokens_per_s_per_gpu"] == pytest.approx(candidate["samples_per_s"] * 1024 / 8)
        assert 0 < candidate["mfu"] < 1
        assert 0 <= candidate["exposed_comm_seconds"] < candidate["step_seconds"]


def test_host_memory_is_shown_and_limited(capfd: pytest.CaptureFixture[str]) -> None:
    job = ("llama-3.1-8b", "--cluster", "2xl40s", "--strategy", "auto")
    data = as_json(capfd, *job)
    *fixed, auto = data["candidates"]
    assert {one["host_bytes"] for one in fixed} == {0}
    assert auto["fits"] == "yes"
    assert auto["host_bytes"] > 2**30
    assert run(*job) == 0
    out = capfd.readouterr().out
    # Both ranks of the node fill it together.
    assert f"auto needs {2 * auto['host_bytes'] / 2**30:.1f} GiB per node" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("▶")]
    assert f"{auto['host_bytes'] / 2**30:.1f}" in row
    too_small = as_json(capfd, *job, "--host-memory", f"{1.5 * auto['host_bytes'] / 2**30:.3f}GiB")
    assert all(2 * one["host_bytes"] <= 1.5 * auto["host_bytes"] for one in too_small["candidates"])


def test_a_fixed_plan_in_host_memory_does_not_fit_if_there_is_too_little(capfd: pytest.CaptureFixture[str]) -> None:
    job = ("gpt-1.3b", "--cluster", "1xh100-80gb", "--micro-batch", "1", "--offload", "states")
    found = as_json(capfd, *job)["candidates"]
    assert [one["strategy"] for one in found] == ["zero2", "shard_grad_op", "fsdp"], "states of the others stay"
    assert {one["fits"] for one in found} == {"yes"}
    needed = min(one["host_bytes"] for one in found) / 2**30
    assert run(*job, "--host-memory", f"{needed - 1:.3f}GiB") == 1
    words = " ".join(capfd.readouterr().out.split())
    assert f"needs {needed:.1f} GiB of host memory per node, of {needed - 1:.1f} GiB" in words
    assert run("gpt-1.3b", "--cluster", "1xh100-80gb", "--offload", "states", "--strategy", "ddp") == 2
    assert "take zero2, shard_grad_op or fsdp" in capfd.readouterr().err
    assert run("gpt-1.3b", "--cluster", "1xh100-80gb", "--offload", "gradients") == 2
    assert "'gradients'" in capfd.readouterr().err


def test_a_host_memory_that_is_no_size_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2-124m", "--cluster", "1xh200", "--host-memory", "much") == 2
    assert "--host-memory = 'much': must be a size" in capfd.readouterr().err


def test_the_table_says_what_fits_and_which_to_take(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.1-8b", "--cluster", "8xh100-80gb", "--micro-batch", "1", "--recompute", "none") == 0
    out = capfd.readouterr().out
    assert "Recommended: fsdp" in out
    assert "not measured" in out
    assert "times ±" in out
    lines = {line.split()[-1] for line in out.splitlines() if line.strip().startswith(("ddp", "▶"))}
    assert lines == {"no", "yes"}


def test_what_does_not_fit_names_a_way_out_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.1-8b", "--cluster", "8xh100-80gb", "--micro-batch", "2", "--recompute", "none") == 1
    out = capfd.readouterr().out
    assert "\n- recompute activations: " in out
    assert out.rpartition("tokens/s per GPU: ")[2].startswith("shardwise plan llama-3.1-8b --cluster 8xh100-80gb")


def test_without_recompute_every_strategy_has_the_best_mode(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ("llama-3.1-8b", "--cluster", "8xh100-80gb", "--micro-batch", "2")
    fixed = [as_json(capfd, *asked, "--recompute", "full")["candidates"]]
    for way in ("none", "selective"):
        run(*asked, "--recompute", way, "--json")
        fixed.append(json.loads(capfd.readouterr().out)["candidates"])
    chosen = as_json(capfd, *asked)["candidates"]
    for number, one in enumerate(chosen):
        rows = [rows[number] for rows in fixed]
        fitting = [row for row in rows if row["fits"] == "yes"]
        if fitting:
            assert one == max(fitting, key=lambda row: row["samples_per_s"])
        else:
            assert one["peak_bytes"]["device"] == min(row["peak_bytes"]["device"] for row in rows)
    assert {one["recompute"] for one in chosen} > {"selective"}, "rows differ"
    assert run(*asked) == 0
    assert "recompute batch" in capfd.readouterr().out


def test_another_system_recomputes_nothing_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    (one,) = as_json(capfd, "llama-3.1-8b", "--cluster", "64xh100-80gb", "--like", "torch-fsdp")["candidates"][-1:]
    assert one["recompute"] == "none"


def test_passes_that_must_reduce_say_so(capfd: pytest.CaptureFixture[str]) -> None:
    common = ("mpt-30b", "--cluster", "8xh100-80gb", "--strategy", "fsdp", "--recompute", "full", "--accumulate", "21")
    assert run(*common, "--micro-batch", "3", "--engine", "torch") == 0
    assert "fsdp reduce them in every pass" in capfd.readouterr().out
    data = as_json(capfd, *common, "--micro-batch", "1", "--accumulate-reduced")
    assert data["candidates"][0]["plan"]["accumulate_reduced"] is True


def test_the_timeline_is_shown_and_in_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt2-124m", "--cluster", "8xh100-80gb", "--micro-batch", "8", "--strategy", "fsdp", "--timeline")
    assert run(*arguments) == 0
    lanes = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("compute", "gather", "reduce"))]
    assert [len(lane) for lane in lanes] == [80, 80, 80]
    assert set("FB") <= set(lanes[0])
    # Short as they are, they are to be seen.
    assert set(lanes[1][8:]) - {"·"}
    assert set(lanes[2][8:]) - {"·"}
    data = as_json(capfd, *arguments)
    (candidate,) = data["candidates"]
    assert {span["queue"] for span in data["timeline"]} == {"compute", "gather", "reduce"}
    assert max(span["end_seconds"] for span in data["timeline"]) == pytest.approx(candidate["step_seconds"], rel=0.01)


def test_the_scaling_table_goes_up_to_16384_devices(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt2-1.5b", "--cluster", "8xh100-80gb", "--micro-batch", "4", "--strategy", "fsdp", "--scale")
    rows = as_json(capfd, *arguments)["scaling"]
    assert [row["num_ranks"] for row in rows] == [2**power for power in range(3, 15)]
    assert rows[0]["efficiency"] == 1
    assert all(row["mesh"]["replicate"] * row["mesh"]["shard"] == row["num_ranks"] for row in rows)
    assert run(*arguments) == 0
    assert "16,384" in capfd.readouterr().out


def test_where_a_device_has_no_speeds_time_is_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    data = as_json(capfd, "gpt2-124m", "--cluster", "4xcpu", "--micro-batch", "1", "--precision", "fp32")
    assert all(candidate["step_seconds"] is None for candidate in data["candidates"])
    assert all(candidate["error_band"]["time"] is None for candidate in data["candidates"])
    assert run("gpt2-124m", "--cluster", "4xcpu", "--micro-batch", "1", "--precision", "fp32") == 0
    shown = capfd.readouterr().out
    assert "time is not predicted: calibrate this device" in shown
    assert "workspaces of the CPU's matrix products are not included" in " ".join(shown.split())
    assert "?" not in shown
    assert "unknown" not in shown


def test_the_saved_plan_can_be_loaded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert run("gpt2-1.5b", "--cluster", "4xa100-40gb", "--strategy", "fsdp", "--save", str(path)) == 0
    capfd.readouterr()
    plan = Plan.load(path)
    assert plan.strategy == "fsdp"
    assert plan.precision == "bf16"
    assert plan.micro_batch is not None
    assert plan.micro_batch > 1
    assert plan.mesh is None, "any number of ranks would do"
    assert run("gpt2-1.5b", "--cluster", "4xa100-40gb", "--mesh", "2x2", "--save", str(path)) == 0
    assert Plan.load(path).mesh == Mesh(replicate=2, shard=2)


def test_options_change_what_is_planned(capfd: pytest.CaptureFixture[str]) -> None:
    common = ("gpt2-124m", "--cluster", "8xh100-80gb", "--micro-batch", "4", "--strategy", "fsdp")

    def peak(*options: str) -> int:
        (candidate,) = as_json(capfd, *common, *options)["candidates"]
        return int(candidate["peak_bytes"]["allocated"])

    plain = peak()
    assert peak("--seq", "512") < plain
    assert peak("--lengths", "256,512") == pytest.approx(peak("--seq", "512"), rel=0.01)
    assert peak("--precision", "fp32") > plain
    assert peak("--recompute", "full") < plain
    assert peak("--optimizer", "sgd") < plain
    assert peak("--engine", "torch") != plain


def test_other_units_are_traced_and_saved_in_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.toml"
    job = ("gpt-tiny", "--cluster", "8xh100-80gb", "--strategy", "fsdp", "--micro-batch", "4")
    gathered = {
        units: as_json(capfd, *job, "--units", units)["candidates"][0]["breakdown_bytes"]["gathered"]
        for units in ("auto", "blocks", "none")
    }
    # Its head and embedding are small: `auto` leaves both at the root.
    assert gathered["blocks"] == gathered["auto"] < gathered["none"]
    assert run(*job, "--units", "leaf", "--save", str(saved)) == 0
    assert ", units leaf, engine shardwise" in capfd.readouterr().out.replace("\n", "")
    assert Plan.load(saved).units == "leaf"


def test_muon_is_planned_with_less_state_and_a_longer_update(capfd: pytest.CaptureFixture[str]) -> None:
    muon, adamw = (
        as_json(capfd, "gpt2-124m", "--cluster", "8xh100-80gb", "--micro-batch", "4", "--optimizer", optimizer)
        for optimizer in ("muon", "adamw")
    )
    for one, other in zip(muon["candidates"], adamw["candidates"], strict=True):
        assert one["breakdown_bytes"]["optim"] < other["breakdown_bytes"]["optim"]
        assert one["step_seconds"] > other["step_seconds"]
        assert (one["comm_bytes_per_step"] > other["comm_bytes_per_step"]) == (one["strategy"] != "ddp")
    assert run("gpt2-124m", "--cluster", "8xh100-80gb", "--micro-batch", "4", "--optimizer", "muon") == 0
    assert "The time of Muon's update is computed from its matrix products" in capfd.readouterr().out


def test_a_number_of_parameters_is_planned_without_activations(capfd: pytest.CaptureFixture[str]) -> None:
    data = as_json(capfd, "params:60b", "--cluster", "64xh100-80gb", "--strategy", "fsdp")
    assert data["candidates"][0]["breakdown_bytes"]["activations"] is None
    assert run("params:60b", "--cluster", "64xh100-80gb") == 0
    assert "activations are unknown" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3", "--cluster", "8xh100"], "unknown model 'gpt3'; did you mean"),
        (["gpt2-124m", "--cluster", "8xh200x"], "unknown device 'h200x'; did you mean"),
        (["gpt2-124m", "--cluster", "8xh100", "--strategy", "fsdp2"], "unknown strategy 'fsdp2'; did you mean"),
        (
            ["gpt2-124m", "--cluster", "8xh100", "--strategy", "zero1", "--engine", "torch"],
            "--strategy zero1: torch has no engine for it; use --engine shardwise",
        ),
        (
            ["gpt2-124m", "--cluster", "8xh100", "--engine", "tourch"],
            "engine = 'tourch': must be one of shardwise, torch",
        ),
        (["gpt2-124m", "--cluster", "8xh100", "--goal", "speed"], "unknown goal 'speed'"),
        (["gpt2-124m", "--cluster", "8xh100", "--optimizer", "lion"], "unknown optimizer 'lion'"),
        (
            ["gpt2-124m", "--cluster", "8xh100", "--optimizer", "muon", "--engine", "torch", "--strategy", "fsdp"],
            "fully_shard gives Muon slices of matrices; use engine = 'shardwise', or strategy = 'ddp'",
        ),
        (["resnet50", "--cluster", "8xh100", "--optimizer", "muon"], "has no matrix in a layer of a numbered block"),
        (
            ["gpt2-124m", "--cluster", "8xh100", "--capture", "on"],
            "capture = 'on' is gone: capture = 'auto' runs units as CUDA graphs in any loop, nothing else is needed",
        ),
        (["gpt2-124m", "--cluster", "8xh100", "--precision", "fp4"], "precision = 'fp4': must be one of"),
        (["gpt2-124m", "--cluster", "8xh100", "--micro-batch", "0"], "micro_batch = 0"),
        (["gpt2-124m", "--cluster", "8xh100", "--image", "3"], "--image has no meaning"),
        (["resnet18", "--cluster", "8xh100", "--seq", "3"], "--seq has no meaning"),
        (
            ["gpt-tiny", "--cluster", "8xh100", "--units", "layers"],
            "units = 'layers': must be one of auto, blocks, class:",
        ),
        (["gpt-tiny", "--cluster", "8xh100", "--units", "class:Foo"], "units = 'class:Foo': the model has no Foo; its"),
        (
            ["gpt-tiny", "--cluster", "8xh100", "--units", "auto + foo"],
            "units = 'auto + foo': the model has no module foo",
        ),
        (["params:60b", "--cluster", "8xh100", "--units", "leaf"], "units = 'leaf': params:60b has no modules to cut"),
        (["params:lots", "--cluster", "8xh100"], "must be a number of parameters"),
        (["params:" + "9" * 5000, "--cluster", "8xh100"], "must be a number of parameters"),
        (["python:nowhere.py:task", "--cluster", "8xh100"], "there is no file nowhere.py"),
        (["hf:nowhere", "--cluster", "8xh100"], "there is no nowhere/config.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_catalogue_model_is_planned_without_torch() -> None:
    code = (
        "import sys; from shardwise.doors.cli.app import main\n"
        "try: main(['plan', 'llama-3.1-8b', '--cluster', '8xh100-80gb', '--json'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_ones_own_model_is_traced_and_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from shardwise.models.tasks import Task\n"
        "def task():\n"
        "    return Task(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),\n"
        "                loss=lambda model, batch: model(batch).sum(), make_batch=lambda size: torch.ones(size, 8))\n"
    )
    data = as_json(capfd, f"python:{tmp_path}/mine.py:task", "--cluster", "2xh100-80gb", "--micro-batch", "4")
    assert data["candidates"][0]["breakdown_bytes"]["activations"] > 0


def test_a_hugging_face_config_is_traced_and_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = as_json(capfd, f"hf:{tmp_path}", "--cluster", "2xh100-80gb", "--seq", "32", "--strategy", "fsdp")
    assert data["candidates"][0]["fits"] == "yes"
    assert data["candidates"][0]["seq"] == 32
    by_file = as_json(
        capfd, f"hf:{tmp_path}/config.json", "--cluster", "2xh100-80gb", "--seq", "32", "--strategy", "FULL_SHARD"
    )
    assert by_file["candidates"] == data["candidates"]


def test_hybrid_shard_means_a_mesh_of_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-124m", "--strategy", "hybrid_shard", "--micro-batch", "4")
    row, across = as_json(capfd, *options, "--cluster", "2x8xh100-80gb")["candidates"]
    assert (row["across"], across["across"]) == ("ddp", "zero2")
    assert across["breakdown_bytes"]["optim"] < 0.6 * row["breakdown_bytes"]["optim"]
    assert (row["strategy"], row["mesh"]) == ("fsdp", {"replicate": 2, "shard": 8})
    row = as_json(capfd, *options, "--cluster", "8xh100-80gb", "--mesh", "2x4")["candidates"][0]
    assert row["mesh"] == {"replicate": 2, "shard": 4}
    assert run(*options, "--cluster", "8xh100-80gb") == 2
    assert "8xh100-80gb is one node; give --mesh" in capfd.readouterr().err


def test_several_strategies_may_be_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-124m", "--micro-batch", "4", "--cluster", "8xh100-80gb")
    rows = as_json(capfd, *options, "--strategy", "zero3,ddp,fsdp")["candidates"]
    assert [row["strategy"] for row in rows] == ["ddp", "fsdp"]
    # The former spelling.
    assert as_json(capfd, *options, "--strategies", "zero3,ddp,fsdp")["candidates"] == rows


def test_a_model_in_one_unit_is_told_with_the_way_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from shardwise.models.tasks import Task\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.c = nn.Linear(999, 999), nn.Linear(999, 999), nn.Linear(999, 1)\n"
        "    def forward(self, x):\n"
        "        return self.c(self.b(self.a(x)))\n"
        "def task():\n"
        "    return Task(model=Net(), loss=lambda model, batch: model(batch).sum(),\n"
        "                make_batch=lambda size: torch.ones(size, 999))\n"
    )
    assert run(f"python:{tmp_path}/mine.py:task", "--cluster", "2xh100-80gb", "--micro-batch", "4") == 0
    told = capfd.readouterr().out
    assert "Note: units = 'auto' leaves 100% of" in told
    assert "units = 'min-params:100000' cuts by size" in told


def test_scaling_keeps_the_global_batch_in_sight(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-3.1-8b", "--cluster", "8xh100", "--strategy", "fsdp", "--micro-batch", "1", "--scale")
    rows = as_json(capfd, *options)["scaling"]
    assert [row["global_batch"] for row in rows] == [row["num_ranks"] for row in rows]
    assert rows[0]["global_batch_tokens"] == 8 * 8192
    assert run(*options) == 0
    assert "134.22M" in capfd.readouterr().out


def test_software_tf32_and_compiling_change_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-350m", "--cluster", "8xh100", "--strategy", "ddp", "--micro-batch", "8", "--engine", "torch")

    def seconds(*more: str) -> float:
        (candidate,) = as_json(capfd, *options, *more)["candidates"]
        return float(candidate["step_seconds"])

    assert seconds("--software", "2023") > 1.1 * seconds()
    assert seconds("--compile", "inductor") < 0.95 * seconds()
    assert seconds("--precision", "fp32", "--matmul-precision", "high") < 0.6 * seconds("--precision", "fp32")
    assert seconds("--software", "2023", "--attention", "cudnn") < seconds("--software", "2023")
    assert run(*options, "--attention", "flash-2") == 0
    assert "Kernels: attention flash-2, matmul cuda-13, norms fused." in capfd.readouterr().out
    assert run(*options, "--attention", "flash-9") == 2
    assert "unknown attention kernel 'flash-9'; did you mean" in capfd.readouterr().err
    assert run(*options, "--software", "1999") == 2
    assert "2023" in capfd.readouterr().err


def test_a_step_that_is_faster_with_units_as_cuda_graphs_is_said_to_be(capfd: pytest.CaptureFixture[str]) -> None:
    """On a device that runs small kernels; not where the device is the slower of the two."""
    asked = ("gpt2-124m", "--strategy", "ddp", "--cluster")
    data = as_json(capfd, *asked, "1xh100-80gb", "--micro-batch", "4")
    assert data["captured"]["step_seconds"] < 0.95 * data["candidates"][0]["step_seconds"]
    run(*asked, "1xh100-80gb", "--micro-batch", "4")
    out = " ".join(capfd.readouterr().out.split())
    assert "With units as CUDA graphs, which is the default, ddp takes 0.0" in out
    assert as_json(capfd, *asked, "1xh100-80gb", "--micro-batch", "32")["captured"] is None
    assert as_json(capfd, *asked, "1xh100-80gb", "--micro-batch", "4", "--capture", "off")["captured"] is None
    assert as_json(capfd, *asked, "1xh100-80gb", "--micro-batch", "4", "--engine", "torch")["captured"] is None


@pytest.mark.parametrize("strategy", ["all", "auto"])
def test_updates_inside_backward_of_several_passes_are_planned_without_a_reduction_in_each(
    strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("gpt-tiny", "--cluster", "4xh100-80gb", "--global-batch", "4096", "--budget", "2GiB")
    plans = [
        one["plan"] for one in as_json(capfd, *asked, "--update", "backward", "--strategy", strategy)["candidates"]
    ]
    assert any(plan.get("accumulate", 1) > 1 for plan in plans)
    assert not any(plan.get("accumulate_reduced") for plan in plans)


def test_updates_inside_backward_are_not_said_to_be_faster_with_graphs(capfd: pytest.CaptureFixture[str]) -> None:
    """They read gradients that would lie in the memory of graphs."""
    asked = ("gpt2-124m", "--cluster", "1xh200", "--strategy", "fsdp", "--micro-batch", "1", "--offload", "states")
    assert run(*asked) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "With units as CUDA graphs, which is the default, fsdp takes 0.0" in out
    assert run(*asked, "--update", "backward") == 0
    assert "graphs" not in capfd.readouterr().out


def test_the_band_says_what_it_follows_from(capfd: pytest.CaptureFixture[str]) -> None:
    data = as_json(capfd, "gpt2-350m", "--cluster", "2x8xa100", "--strategy", "zero2", "--like", "deepspeed")
    for candidate in data["candidates"]:
        assert "across nodes" in candidate["band_of_time_from"]
        assert candidate["error_band"]["time"] > 0.2


def test_another_system_sets_its_own_defaults_and_names_them(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-3.2-1b", "--cluster", "8xh100-80gb", "--micro-batch", "1", "--accumulate", "4")
    data = as_json(capfd, *options, "--like", "torch-fsdp")
    plan = data["candidates"][-1]["plan"]
    assert [one["strategy"] for one in data["candidates"]] == ["shard_grad_op", "fsdp"]
    assert (plan["engine"], plan["reduce_dtype"], plan["accumulate_reduced"]) == ("torch", "bf16", True)
    assert "--reduce-dtype bf16, gradients reduced in every pass" in data["like"]
    # What is given wins.
    data = as_json(capfd, *options, "--like", "torch-fsdp", "--reduce-dtype", "fp32", "--strategy", "fsdp")
    assert [one["plan"].get("reduce_dtype", "fp32") for one in data["candidates"]] == ["fp32"]
    assert run(*options, "--like", "megatron-ddp") == 0
    assert "Like megatron-ddp (Megatron-Core DDP): --engine shardwise" in capfd.readouterr().out
    assert run(*options, "--like", "deepsped") == 2
    assert "did you mean" in capfd.readouterr().err


def test_torchs_engine_has_the_usual_loss(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-3.2-1b", "--cluster", "8xh100-80gb", "--micro-batch", "1", "--seq", "4096", "--strategy", "fsdp")

    def peak(*more: str) -> int:
        return int(as_json(capfd, *options, *more)["candidates"][0]["peak_bytes"]["allocated"])

    assert peak("--engine", "torch") > peak("--engine", "torch", "--loss", "lean") + 4096 * 128256 * 4
    assert peak("--loss", "usual") > peak()
    for model, loss, message in (("resnet18", "lean", "has a loss of its own"), ("gpt-tiny", "less", "unknown loss")):
        assert run(model, "--cluster", "8xh100-80gb", "--loss", loss) == 2
        assert message in capfd.readouterr().err


def test_tiled_modules_need_less_memory(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-tiny", "--cluster", "8xh100-80gb", "--strategy", "fsdp", "--micro-batch", "8", "--seq", "256")
    whole, tiled = (
        as_json(capfd, *options, *more)["candidates"][0]["breakdown_bytes"]["activations"]
        for more in ((), ("--tile", "*.feed_forward=32"))
    )
    assert tiled < whole
    for tile, message in (("*.mlp", "must be MODULES=TOKENS"), ("*.mlp=32", "matches no module")):
        assert run(*options, "--tile", tile) == 2
        assert message in capfd.readouterr().err


def test_adapters_have_little_state_and_a_base_in_four_bits_is_smaller(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-tiny", "--cluster", "2xh100-80gb", "--strategy", "ddp", "--micro-batch", "1")
    adapters = ("--lora", "4", "--lora-targets", "q")
    full, adapted, packed = (
        as_json(capfd, *options, *more)["candidates"][0]["breakdown_bytes"]
        for more in ((), adapters, (*adapters, "--quantize", "nf4"))
    )
    assert packed["optim"] == adapted["optim"] < 0.05 * full["optim"]
    assert packed["params"] < 0.6 * adapted["params"]
    assert run(*options, "--quantize", "nf4") == 2
    assert "needs --lora RANK" in capfd.readouterr().err


def test_an_assumed_fabric_is_named_and_widens_the_band(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("llama-2-7b", "--strategy", "fsdp", "--mesh", "1x64", "--seq", "2048", "--micro-batch", "1")
    assumed = as_json(capfd, *options, "--cluster", "8x8xa100-80gb")
    given = as_json(capfd, *options, "--cluster", "8x8xa100-80gb@ib-8x200")
    slow = as_json(capfd, *options, "--cluster", "8x8xa100-80gb", "--fabric-gbps", "496")
    assert (assumed["fabric"]["assumed"], given["fabric"]["assumed"]) == (True, False)
    (one,), (two,), (three,) = (data["candidates"] for data in (assumed, given, slow))
    assert one["step_seconds"] == two["step_seconds"]
    assert one["error_band"]["time"] > 2 * two["error_band"]["time"]
    low, high = one["step_seconds_range"]
    assert low < one["step_seconds"] < three["step_seconds"] < high
    assert 496e9 / 8 < assumed["fabric"]["needed_bytes_per_s"] < 8 * 25e9
    assert run(*options, "--cluster", "8x8xa100-80gb") == 0
    shown = capfd.readouterr().out
    assert "Fabric assumed: ib-8x200 (1,600 Gb/s per node)" in shown
    assert "the fabric is assumed)" in shown
    assert run("gpt2-124m", "--cluster", "8xa100-80gb", "--fabric-gbps", "400") == 2
    assert "8xa100-80gb is one node" in capfd.readouterr().err


def test_auto_is_a_row_of_its_own_and_is_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    common = ("llama-3.1-8b", "--cluster", "8xh100-80gb", "--micro-batch", "1", "--budget", "60GiB")
    data = as_json(capfd, *common, "--strategy", "auto", "--save", str(path))
    assert [candidate["strategy"] for candidate in data["candidates"]] == [*STRATEGIES, "auto"]
    auto = data["candidates"][data["recommended"]]
    assert auto["strategy"] == "auto"
    assert auto["fits"] == "yes"
    assert auto["capacity_bytes"] == 60 * 2**30
    assert "recompute" in data["why"]
    assert Plan.load(path).to_dict() == {name: value for name, value in auto["plan"].items() if name != "mesh"}
    assert run("explain", str(path), "--model", "llama-3.1-8b", command=()) == 0
    out = capfd.readouterr().out
    assert "to blocks.31" in out
    assert run("explain", str(path), command=()) == 2
    assert "give their model with --model" in capfd.readouterr().err


def test_auto_is_never_behind_a_row_of_the_table(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("gpt2-350m", "--cluster", "4xl4", "--strategy", "auto", "--micro-batch", "2")

    def slow(spec_for: SpecFor, *, request: AutoRequest) -> Solved:
        plan = replace(request.plan, strategy="fsdp", recompute="full", mesh=Mesh(shard=4), micro_batch=1)
        found = cost(spec_for(plan), plan=plan, cluster=request.cluster, optimizer="adamw")
        return Solved(candidate=replace(found, label="auto"), num_replays=1)

    monkeypatch.setattr("shardwise.planner.search.auto._solved", slow)
    *fixed, auto = as_json(capfd, *asked)["candidates"]
    assert auto["samples_per_s"] == max(one["samples_per_s"] for one in fixed)
    assert auto["strategy"] == "auto"


def test_auto_that_cannot_fit_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-1.5b", "--cluster", "8xa100-40gb", "--strategy", "auto", "--budget", "2GiB", "--micro-batch", "1")
    assert run(*options) == 1
    assert "no plan for 8xa100-40gb fits into 2.00 GiB per device" in capfd.readouterr().out.replace("\n", " ")


def test_the_cost_of_a_training_follows_from_its_speed(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-350m", "--cluster", "8xh100", "--strategy", "fsdp", "--global-batch", "512")
    data = as_json(capfd, *options, "--tokens", "300B", "--price", "2.50")
    (candidate,), (row,) = data["candidates"], data["training"]
    assert candidate["micro_batch"] * candidate["accumulate"] * 8 == 512
    assert (row["global_batch"], row["global_batch_tokens"]) == (512, 512 * 1024)
    assert row["days"] == pytest.approx(300e9 / row["tokens_per_day"])
    assert row["tokens_per_day"] == pytest.approx(candidate["samples_per_s"] * 1024 * 86_400)
    assert row["cost"] == pytest.approx(2.5 * row["gpu_hours"])
    assert row["gpu_hours"] == pytest.approx(row["days"] * 24 * 8)
    assert run(*options, "--tokens", "300B", "--price", "2.50") == 0
    assert "GPU-hours" in capfd.readouterr().out


def test_mesh_passes_reduce_dtype_and_recompute_by_unit_can_be_set(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-124m", "--cluster", "2x8xh100", "--strategy", "fsdp", "--micro-batch", "2")
    settings = ("--mesh", "4x4", "--accumulate", "3", "--reduce-dtype", "bf16", "--recompute", "full,blocks.[0-3]=none")
    (candidate,) = as_json(capfd, *options, *settings, "--across", "zero1")["candidates"]
    plan = candidate["plan"]
    assert (plan["mesh"], plan["across"]) == ({"replicate": 4, "shard": 4}, "zero1")
    assert (plan["accumulate"], plan["reduce_dtype"], plan["recompute"]) == (3, "bf16", "full")
    assert plan["recompute_overrides"] == {"blocks.[0-3]": "none"}


def test_the_frontier_shows_auto_against_the_fastest_fixed_plan(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("gpt2-124m", "--cluster", "1xa100-40gb", "--strategy", "ddp", "--micro-batch", "32", "--frontier")
    points = as_json(capfd, *options)["frontier"]
    assert len(points) == 8
    both = [point for point in points if point["auto"] and point["fixed"]]
    assert both
    for point in both:
        assert point["auto"]["device_bytes"] <= point["budget_bytes"]
        assert point["auto"]["samples_per_s"] >= 0.998 * point["fixed"]["samples_per_s"]
    assert run(*options) == 0
    assert "fastest fixed plan" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "lots"], "--budget = 'lots': must be a size, such as 60GiB"),
        (["--tokens", "many"], "--tokens many: must be a number"),
        (["--price", "2"], "--price needs --tokens"),
        (["--mesh", "8"], "--mesh 8: must be REPLICATExSHARD"),
        (["--mesh", "3x3"], "9"),
        (["--global-batch", "9"], "it must be a multiple of 8"),
        (["--lengths", "512,0"], "--lengths 512,0: say the tokens per sample of each batch, as 1024,512,768"),
        (["--lengths", "512,256", "--seq", "1024"], "--seq 1024: the longest is the sample that is planned"),
        (["--recompute", "full,nowhere=none"], "recompute_overrides.nowhere matches no unit"),
    ],
)
def test_options_that_cannot_be_met_are_one_line(
    options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("gpt2-124m", "--cluster", "8xh100", "--strategy", "ddp", "--micro-batch", "1", *options) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_task_says_its_tokens_per_sample(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\nfrom shardwise.models.tasks import Task\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "    return Task(model=model, loss=lambda model, batch: model(batch).square().mean(),\n"
        "                make_batch=lambda size: torch.zeros(size, 128, 8), tokens_per_sample=128)\n"
    )
    options = (f"python:{file}:make", "--cluster", "2xh100-80gb", "--micro-batch", "4", "--tokens", "1B")
    data = as_json(capfd, *options, "--price", "2.5")
    assert data["candidates"][0]["seq"] == 128
    assert data["training"][0]["global_batch_tokens"] == 2 * 4 * 128
    assert data["training"][0]["cost"] > 0
