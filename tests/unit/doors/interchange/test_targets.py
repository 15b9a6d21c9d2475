"""Every target's files are what its own parser reads, and say what they leave out."""

import json
import stat
import subprocess
from pathlib import Path

import pytest

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.doors.cli.app import main
from shardwise.doors.interchange.check_setup import check_setup
from shardwise.doors.interchange.exported import JobShape
from shardwise.doors.interchange.recognise import read_setup
from shardwise.doors.interchange.targets import TARGETS, export, write
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh

EIGHT = JobShape(ranks_per_node=8)
TWO_NODES = JobShape(num_nodes=2, ranks_per_node=8)
FULL = {"precision": "bf16", "units": "class:Block", "accumulate": 4, "micro_batch": 2, "recompute": "full"}


def file_of(plan: Plan, target: str, folder: Path, *, shape: JobShape = EIGHT) -> Path:
    return write(export(plan, shape, target=target), folder=folder)[0]


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "torchtitan"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_exported_is_read_back_as_the_same_decision(strategy: str, target: str, tmp_path: Path) -> None:
    plan = Plan(strategy=strategy, **FULL)  # type: ignore[arg-type]
    setup = read_setup(file_of(plan, target, tmp_path))
    nearest = {
        ("deepspeed", "shard_grad_op"): "fsdp",
        ("torchtitan", "zero1"): "ddp",
        ("torchtitan", "zero2"): "ddp",
    }
    assert setup.plan.strategy == nearest.get((target, strategy), strategy)
    assert setup.num_ranks == 8
    assert setup.plan.precision == "bf16"
    if target != "accelerate":
        assert (setup.plan.micro_batch, setup.plan.accumulate) == (2, 4)
    # ZeRO's stages 2 and 3 reduce in every pass; nothing else is to be found in what we write.
    assert {finding.code for finding in check_setup(setup)} <= {"SW106"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accelerate_reads_its_file(strategy: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    plan = Plan(strategy=strategy, **FULL)  # type: ignore[arg-type]
    config = config_args.load_config_from_file(str(file_of(plan, "accelerate", tmp_path)))
    kinds = {"ddp": "MULTI_GPU", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED"}
    assert str(config.distributed_type).rpartition(".")[2] == kinds.get(strategy, "FSDP")
    assert config.num_processes == 8
    assert config.mixed_precision == "bf16"
    if strategy == "shard_grad_op":
        assert config.fsdp_config["fsdp_reshard_after_forward"] is False


def test_accelerates_launcher_hands_our_keys_to_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = file_of(Plan(**FULL), "accelerate", tmp_path)  # type: ignore[arg-type]
    # A GPU machine's launcher, on any machine.
    monkeypatch.setattr(launch, "is_bf16_available", lambda *_: True, raising=False)
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, *_ = launch._validate_launch_command(args)
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    plugin = accelerate.FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, True)
    assert plugin.transformer_cls_names_to_wrap == ["Block"]


def test_a_mesh_becomes_hybrid_sharding_where_the_target_has_it(tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=2, shard=8), **FULL)  # type: ignore[arg-type]
    for target in ("accelerate", "torchtitan"):
        setup = read_setup(file_of(plan, target, tmp_path / target, shape=TWO_NODES))
        assert str(setup.plan.mesh) == "2×8"
    across = Plan(mesh=Mesh(replicate=2, shard=8), across="zero2", **FULL)  # type: ignore[arg-type]
    setup = read_setup(file_of(across, "deepspeed", tmp_path / "hpz", shape=TWO_NODES))
    assert (str(setup.plan.mesh), setup.plan.across) == ("2×8", "zero2")
    assert any("across" in line for line in export(across, TWO_NODES, target="torchtitan").left_out)
    with pytest.raises(InvalidPlan, match="mesh 2×8 is 16 ranks, but the job has 8"):
        export(plan, EIGHT, target="accelerate")


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "torchtitan"])
def test_fp8_is_not_exported_to_another_engine(target: str) -> None:
    with pytest.raises(InvalidPlan, match=f"precision = 'fp8' is Shardwise's own, and not for {target}"):
        export(Plan(precision="fp8"), JobShape(ranks_per_node=8), target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_cannot_express_is_said_in_the_files_and_apart(target: str) -> None:
    plan = Plan(overrides={"head": "ddp"}, keep_fp32=("*.norm",), offload_activations=True)
    exported = export(plan, EIGHT, target=target)
    if "plan.toml" in exported.files:
        # Our own trainer runs the plan itself.
        assert not exported.left_out
        return
    text = "".join(exported.files.values())
    for word in ("overrides", "keep_fp32", "offload_activations"):
        assert any(line.startswith(f"{word} = ") for line in exported.left_out), exported.left_out
        assert f"{word} = " in text


def test_scripts_are_bash_and_start_as_many_ranks_as_asked(tmp_path: Path) -> None:
    for target, words in (("torchrun", "--nnodes 2 --nproc-per-node 8"), ("slurm", "--ntasks-per-node=8")):
        path = file_of(Plan(), target, tmp_path / target, shape=TWO_NODES)
        assert words in path.read_text()
        assert path.stat().st_mode & stat.S_IXUSR
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert "gpus" not in export(Plan(), JobShape(ranks_per_node=2, has_gpus=False), target="slurm").files["job.sbatch"]


def test_nothing_is_written_over_and_unknown_targets_are_named(tmp_path: Path) -> None:
    file_of(Plan(), "deepspeed", tmp_path)
    before = (tmp_path / "deepspeed.json").read_text()
    with pytest.raises(InvalidPlan, match="exists: remove it"):
        file_of(Plan(strategy="ddp"), "deepspeed", tmp_path)
    assert (tmp_path / "deepspeed.json").read_text() == before
    with pytest.raises(UnknownName, match="unknown target 'accelerat'; did you mean accelerate"):
        export(Plan(), EIGHT, target="accelerat")


def test_the_command_prints_files_and_says_on_stderr_what_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Plan(overrides={"head": "ddp"}).save(tmp_path / "plan.toml")
    with pytest.raises(SystemExit) as ended:
        main(
            ["export", str(tmp_path / "plan.toml"), "--to", "deepspeed", "--out", str(tmp_path / "out"), "--ranks", "4"]
        )
    assert ended.value.code == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == str(tmp_path / "out" / "deepspeed.json")
    assert json.loads((tmp_path / "out" / "deepspeed.json").read_text())["train_batch_size"] == 4
    assert err.startswith("deepspeed: overrides = ")


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "torchtitan"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_host_memory_of_some_units_is_exported_as_that_of_all_and_said(strategy: str, target: str) -> None:
    plan = Plan(strategy=strategy, offload_states=["blocks.1*"], **FULL)  # type: ignore[arg-type]
    exported = export(plan, EIGHT, target=target)
    assert any("offload_states = ['blocks.1*']" in line and "offloads all units" in line for line in exported.left_out)
    assert any(line.startswith("offload_update = device") for line in exported.left_out)
    words = ("offload_optimizer=True", "cpu_offload=True", "enable_cpu_offload = true", "fsdp_offload_params: true")
    words += ("offload_optimizer_device: cpu", '"device": "cpu"')
    assert any(word in text for text in exported.files.values() for word in words)
    whole = Plan(strategy=strategy, offload_states=True, offload_update="host", **FULL)  # type: ignore[arg-type]
    assert not any("offload" in line for line in export(whole, EIGHT, target=target).left_out)


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "torchtitan"])
def test_offload_of_other_tools_is_read_as_updates_by_the_cpu(target: str, tmp_path: Path) -> None:
    plan = Plan(strategy="fsdp", offload_states=True, offload_update="host", **FULL)  # type: ignore[arg-type]
    found = read_setup(file_of(plan, target, tmp_path)).plan
    assert (found.strategy, found.offload_states, found.offload_update) == ("fsdp", True, "host")
