"""Recognises and checks files and folders of Shardwise other than plans and configs, and describes each in one line.

a cluster or device table    TOML of `shardwise calibrate`, or written by hand
a bench                      bench.json, or the folder that holds it
a checkpoint, or several     step-00001000/, or checkpoints/
a run                        the folder of `shardwise train`, its metrics.jsonl
a token file                 OUT.bin and OUT.idx of `shardwise tokens`
records of a failed job      autopsy-rank-N.json
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import InvalidData, InvalidPlan, ShardwiseError
from shardwise.base.files.data_file import UnreadableFile, parse_json, read_json, read_text, read_toml

_MOST_METRICS_BYTES = 2**32
_CLUSTER_KEYS = {"num_nodes", "devices_per_node", "device", "fabric", "link"}


def describe_own(path: Path) -> str | None:
    """Return a description in one line; None if it is none of these. A damaged file raises an error."""
    for describe in (_checkpoint, _bench, _run, _metrics, _cluster, _tokens, _record):
        described = describe(path)
        if described is not None:
            return described
    if path.is_dir():
        raise InvalidPlan(f"{path}: a folder without a checkpoint, a bench or a run of Shardwise in it")
    return None


def _checkpoint(path: Path) -> str | None:
    if not (path / "manifest.json").is_file() and not any(path.glob("step-*/manifest.json")):
        return None
    from shardwise.state.checkpoint.folder import checkpoints_in
    from shardwise.state.checkpoint.verify import verify

    found = checkpoints_in(path) or [path]
    newest = [verify(one) for one in found][-1].contents
    strategy = newest.plan["strategy"] if newest.plan else "no plan"
    kind = "a checkpoint" if found == [path] else f"{len(found)} checkpoints, the newest"
    return (
        f"{kind} of step {newest.step:,}, saved by {newest.num_ranks} ranks under {strategy}; "
        "all files match their checksums"
    )


def _bench(path: Path) -> str | None:
    if not (path / "bench.json").is_file() and not {"cases", "equivalence"} <= _json_keys(path):
        return None
    from shardwise.measure.bench.results import load_bench

    bench = load_bench(path)
    ran = [case.name for case in bench.ran]
    verdict = "the losses match" if bench.equivalence.agrees else "the losses do not match"
    return f"a bench, {bench.name}, of {', '.join(ran) or 'no case that ran'} on {bench.num_ranks} ranks; {verdict}"


def _run(path: Path) -> str | None:
    if not (path / "config.toml").is_file() or not (path / "environment.json").is_file():
        return None
    from shardwise.training.config.config import load_config

    config = load_config(path / "config.toml")
    elsewhere = config.checkpoint.folder
    checkpoints = (
        f"checkpoints in {elsewhere}" if elsewhere else _checkpoint(path / "checkpoints") or "no checkpoint yet"
    )
    steps = _metrics(path / "metrics.jsonl")
    return f"a run of {config.task.model} under {config.plan.strategy}: {steps}; {checkpoints}"


def _metrics(path: Path) -> str | None:
    if path.name != "metrics.jsonl":
        return None
    try:
        lines = read_text(path, most_bytes=_MOST_METRICS_BYTES).splitlines()
        last = parse_json(lines[-1]) if lines else {}
    except UnreadableFile as error:
        if error.is_missing:
            return "no step yet"
        raise InvalidData(f"{path}: is not one JSON object per line: {error}") from error
    if not isinstance(last, dict) or "step" not in last:
        return "no step yet" if not lines else f"{len(lines)} lines without a step"
    return f"metrics of {len(lines):,} steps, the last {last['step']} with loss {last.get('loss')}"


def _cluster(path: Path) -> str | None:
    try:
        if path.suffix != ".toml" or not _CLUSTER_KEYS & set(read_toml(path)):
            return None
    except ShardwiseError:
        return None
    from shardwise.hardware.cluster import read_cluster_file

    cluster = read_cluster_file(path)
    measured = "calibrated" if cluster.device.calibration is not None else "not calibrated"
    return f"a cluster for `shardwise plan --cluster`: {cluster}, {cluster.num_ranks} devices, {measured}"


def _tokens(path: Path) -> str | None:
    if path.suffix not in (".bin", ".idx") or not path.with_suffix(".idx").is_file():
        return None
    from shardwise.models.data.tokens import open_tokens

    found = open_tokens(path.with_suffix(""))
    return f"a token file: {len(found.tokens):,} tokens, vocabulary {found.vocab_size:,}"


def _record(path: Path) -> str | None:
    from shardwise.comm.autopsy.own_record import PREFIX, read_record

    if not path.is_file() or not path.name.startswith(PREFIX):
        return None
    rank = read_record(path).rank
    return f"what rank {rank} had issued when a job failed; shardwise autopsy {path.parent} compares all ranks"


def _json_keys(path: Path) -> set[str]:
    """Return the keys of the object in a JSON file; none if the file holds anything else."""
    if path.suffix != ".json" or not path.is_file():
        return set()
    try:
        found: Any = read_json(path, most_bytes=2**26)
    except UnreadableFile:
        return set()
    return set(found) if isinstance(found, Mapping) else set()
