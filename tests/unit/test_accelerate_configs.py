"""The config files of the Accelerate pair: their keys, their comments, and what Accelerate makes of them."""

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.models.own.vit import Block

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "accelerate"

WANTED: dict[str, dict[str, Any]] = {
    "config_ddp.yaml": {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 2},
    "config_fsdp.yaml": {
        "distributed_type": "FSDP",
        "mixed_precision": "fp16",
        "num_processes": 2,
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_activation_checkpointing": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    },
    "config_fsdp2.yaml": {
        "distributed_type": "FSDP",
        "mixed_precision": "fp16",
        "num_processes": 2,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_activation_checkpointing": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    },
}
ONLY_IN_VERSION = {1: {"fsdp_sharding_strategy", "fsdp_backward_prefetch"}, 2: {"fsdp_reshard_after_forward"}}

pytestmark = pytest.mark.timeout(60)


def plugin_of(config: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> FullyShardedDataParallelPlugin:
    """The plugin that a script gets when `accelerate launch` starts it with a config."""
    command = ["--config_file", str(FOLDER / config), *options, "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.setenv(name, value)
    # Both are for loading on GPUs; without one the plugin refuses them.
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    return FullyShardedDataParallelPlugin()


def test_the_folder_holds_the_script_and_these_configs_and_is_no_package() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_file()) == sorted([*WANTED, "train.py"])


def test_the_folder_does_not_hide_the_package_of_the_same_name() -> None:
    found = importlib.machinery.PathFinder.find_spec("accelerate", [str(ROOT), *sys.path])
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).name == "__init__.py"
    assert not Path(found.origin).is_relative_to(FOLDER)


@pytest.mark.parametrize("name", WANTED)
def test_a_config_holds_exactly_these_keys(name: str) -> None:
    assert yaml.safe_load((FOLDER / name).read_text()) == WANTED[name]


@pytest.mark.parametrize("name", WANTED)
def test_every_key_has_a_comment_above_it(name: str) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.lstrip().startswith("#") and line != "fsdp_config:":
            assert above.lstrip().startswith("# "), f"{name}: {line} has no comment"


@pytest.mark.parametrize("version", [1, 2])
def test_keys_of_the_two_versions_are_never_mixed(version: int) -> None:
    for name in WANTED:
        keys = yaml.safe_load((FOLDER / name).read_text()).get("fsdp_config", {})
        if keys.get("fsdp_version") == version:
            assert ONLY_IN_VERSION[version] <= set(keys)
            assert not ONLY_IN_VERSION[3 - version] & set(keys)


@pytest.mark.parametrize("name", WANTED)
def test_accelerate_reads_a_config(name: str) -> None:
    config = load_config_from_file(str(FOLDER / name))
    assert config.distributed_type == DistributedType(WANTED[name]["distributed_type"])
    assert config.num_processes == 2
    assert config.fsdp_config == WANTED[name].get("fsdp_config", {})


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_accelerate_makes_an_fsdp_plugin_of_version_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--fsdp_sharding_strategy", name)
    plugin = plugin_of("config_fsdp.yaml", *options, monkeypatch=monkeypatch)
    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is ShardingStrategy[name]
    assert plugin.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.activation_checkpointing is False


def test_accelerate_makes_an_fsdp_plugin_of_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugin_of("config_fsdp2.yaml", monkeypatch=monkeypatch)
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.activation_checkpointing is False


@pytest.mark.parametrize("config", ["config_fsdp.yaml", "config_fsdp2.yaml"])
def test_the_class_to_wrap_is_found_in_our_model(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugin_of(config, monkeypatch=monkeypatch)
    plugin.set_auto_wrap_policy(build_model(shape_of("vit-tiny"), device="meta"))
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
