"""Files and folders of ours that are neither plans nor configs: recognised, checked, and summed up in a line.

a cluster or device table    TOML of `shardwise calibrate`, or written by hand
a bench                      bench.json, or the folder that holds it
a checkpoint, or several     step-00001000/, or checkpoints/
a run                        the folder of `shardwise train`, its metrics.jsonl
a token file                 OUT.bin and OUT.idx of `shardwise tokens`
records of a failed job      autopsy-rank-N.json
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import InvalidData, InvalidPlan, ShardwiseError
from shardwise.files.toml_file import read_toml

_CLUSTER_KEYS = {"num_nodes", "devices_per_node", "device", "fabric", "link"}


def describe_own(path: Path) -> str | None:
    """What it is, as one line, once it is found to be in order; None if it is none of these. What is damaged raises."""
    for is_kind, describe in _KINDS:
        if is_kind(path):
            return describe(path)
    if path.is_dir():
        raise InvalidPlan(f"{path}: a folder without a checkpoint, a bench or a run of Shardwise in it")
    return None


def _is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file() or any(path.glob("step-*/manifest.json"))


def _checkpoint(path: Path) -> str:
    from shardwise.checkpoint.folder import checkpoints_in
    from shardwise.checkpoint.verify import verify

    found = checkpoints_in(path) or [path]
    newest = [verify(one) for one in found][-1].contents
    strategy = newest.plan["strategy"] if newest.plan else "no plan"
    kind = "a checkpoint" if found == [path] else f"{len(found)} checkpoints, the newest"
    return (
        f"{kind} of step {newest.step:,}, saved by {newest.num_ranks} ranks under {strategy}; "
        "every file has its checksum"
    )


def _is_bench(path: Path) -> bool:
    return (path / "bench.json").is_file() or {"cases", "equivalence"} <= _json_keys(path)


def _bench(path: Path) -> str:
    from shardwise.bench.results import load_bench

    bench = load_bench(path)
    ran = [case.name for case in bench.cases if case.ran]
    verdict = "the losses match" if bench.equivalence.agrees else "the losses do not match"
    return f"a bench, {bench.name}, of {', '.join(ran) or 'no case that ran'} on {bench.num_ranks} ranks; {verdict}"


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "environment.json").is_file()


def _run(path: Path) -> str:
    from shardwise.train.config import load_config

    config = load_config(path / "config.toml")
    saved = path / "checkpoints"
    checkpoints = _checkpoint(saved) if _is_checkpoint(saved) else "no checkpoint yet"
    return (
        f"a run of {config.task.model} under {config.plan.strategy}: {_metrics(path / 'metrics.jsonl')}; {checkpoints}"
    )


def _is_metrics(path: Path) -> bool:
    return path.name == "metrics.jsonl"


def _metrics(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1]) if lines else {}
    except FileNotFoundError:
        return "no step yet"
    except (OSError, ValueError) as error:
        raise InvalidData(f"{path}: cannot be read as one JSON object per line ({error})") from error
    if not isinstance(last, dict) or "step" not in last:
        return "no step yet" if not lines else f"{len(lines)} lines without a step"
    return f"metrics of {len(lines):,} steps, the last {last['step']:,} with loss {last.get('loss')}"


def _is_cluster(path: Path) -> bool:
    if path.suffix != ".toml":
        return False
    try:
        return bool(_CLUSTER_KEYS & set(read_toml(path)))
    except ShardwiseError:
        return False


def _cluster(path: Path) -> str:
    from shardwise.hardware.cluster_file import read_cluster_file

    cluster = read_cluster_file(path)
    measured = "calibrated" if cluster.device.calibration is not None else "not calibrated"
    return f"a cluster for `shardwise plan --cluster`: {cluster}, {cluster.num_ranks} devices, {measured}"


def _is_tokens(path: Path) -> bool:
    return path.suffix in (".bin", ".idx") and path.with_suffix(".idx").is_file()


def _tokens(path: Path) -> str:
    from shardwise.data.tokens import open_tokens

    found = open_tokens(path.with_suffix(""))
    return f"a token file: {len(found.tokens):,} tokens, vocabulary {found.vocab_size:,}"


def _is_record(path: Path) -> bool:
    from shardwise.autopsy.own_record import PREFIX

    return path.is_file() and path.name.startswith(PREFIX)


def _record(path: Path) -> str:
    from shardwise.autopsy.own_record import read_record

    return (
        f"what rank {read_record(path).rank} had issued when a job failed; shardwise autopsy {path.parent} compares all"
    )


def _json_keys(path: Path) -> set[str]:
    """Of the object that a JSON file holds; none where it is something else."""
    if path.suffix != ".json" or not path.is_file():
        return set()
    try:
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, Mapping) else set()


_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], str]], ...] = (
    (_is_checkpoint, _checkpoint),
    (_is_bench, _bench),
    (_is_run, _run),
    (_is_metrics, _metrics),
    (_is_cluster, _cluster),
    (_is_tokens, _tokens),
    (_is_record, _record),
)
