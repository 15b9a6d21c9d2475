"""The one reader of files that others write: each input that it refuses is one line, within a moment."""

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.base.files.data_file import UnreadableFile, check_values, read_json, read_text, read_toml, read_yaml

SOURCE = Path(shardwise.__file__).parent
pytestmark = pytest.mark.timeout(20)

Reader = Callable[[Path], Any]
READERS: list[Reader] = [read_json, read_toml, read_yaml, read_text]


@pytest.mark.parametrize("read", READERS)
def test_only_a_regular_file_of_a_limited_size_is_read(tmp_path: Path, read: Reader) -> None:
    pipe, large, kernel = tmp_path / "pipe", tmp_path / "large", Path("/proc/self/smaps")
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**40)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(UnreadableFile, match=r"cannot be read \(is not a regular file\)"):
            read(path)
    with pytest.raises(UnreadableFile, match=r"cannot be read \(is larger than 4,194,304 bytes\)"):
        read(large)
    with pytest.raises(UnreadableFile, match="cannot be read") as caught:
        read(tmp_path / "none")
    assert caught.value.is_missing
    # Its size is 0 to the file system.
    with pytest.raises(UnreadableFile, match=r"is larger than 10 bytes"):
        read_text(kernel, most_bytes=10)


@pytest.mark.parametrize("levels", [101, 900, 100_000])
def test_values_that_are_nested_too_deeply_are_refused(tmp_path: Path, levels: int) -> None:
    nested = "[" * levels + "]" * levels
    for read, text in ((read_json, nested), (read_toml, f"a = {nested}"), (read_yaml, nested)):
        path = tmp_path / "deep"
        path.write_text(text)
        with pytest.raises(UnreadableFile, match="nested too deeply: more than 100 levels"):
            read(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_of_json_are_finite_unless_a_reader_says_otherwise(tmp_path: Path, number: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": [1, {number}]}}')
    with pytest.raises(UnreadableFile, match=r"is not JSON \(it holds NaN or Infinity, and its numbers must be finite"):
        read_json(path)
    assert len(read_json(path, finite=False)["a"]) == 2


def test_numbers_of_yaml_are_short(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: " + "1:" * 10**6 + "1")
    with pytest.raises(UnreadableFile, match="more than 400 digits"):
        read_yaml(path)


def test_merged_tables_of_yaml_are_counted_before_they_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n}\n  <<: [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 12)]
    path.write_text("\n".join(lines))
    with pytest.raises(UnreadableFile, match="stands for more than 100,000 values, by aliases: write them out"):
        read_yaml(path)
    path.write_text("base: &base {x: 1, y: 2}\nown:\n  <<: *base\n  y: 3\n")
    assert read_yaml(path)["own"] == {"x": 1, "y": 3}


def test_an_object_in_several_places_counts_in_each() -> None:
    value: list[Any] = [1] * 10
    for _ in range(5):
        value = [value] * 10
    with pytest.raises(ValueError, match="more than 100,000 values"):
        check_values(value, finite=True, most_values=100_000)


# What reads a content by itself, and why it may. Files that come from elsewhere are not among them.
OWN_READERS = {
    "base/files/data_file.py": "is the reader",
    "comm/autopsy/flight_recorder.py": "pickles, whose instructions it checks first",
    "measure/bench/worker.py": "values that ranks of one job put into its store",
    "state/checkpoint/disk.py": "opens to write and to sync",
    "doors/cli/app.py": "/dev/null",
    "doors/cli/bench.py": "output of its own process",
    "doors/cli/checkpoint.py": "a manifest that read_manifest has read",
    "comm/watch/noticeboard.py": "values that ranks of one job put into its store",
    "comm/groups/small_collectives.py": "messages between ranks of one job",
    "models/data/images.py": "images, whose number of pixels it checks",
    "models/data/text.py": "text of any length, piece by piece, from files that open_to_read has opened",
    "models/data/tokens.py": "tokens of any number, mapped into memory",
    "base/files/held_folder.py": "opens a folder, to hold it",
    "base/files/upload.py": "opens objects to write",
    "hardware/measuring/device_file.py": "its own text",
    "hardware/host_here.py": "/proc/cpuinfo",
    "hardware/host_memory.py": "files of the kernel",
    "hardware/sourced.py": "tables of this package",
    "training/launch/rank_files.py": "the ranks' logs, which the launcher has made",
    "training/launch/warm_process.py": "commands of the launcher",
    "planner/engine_model.py": "a table of this package",
    "state/recovery/generation.py": "data of snapshots, mapped into memory",
    "state/recovery/memory_folder.py": "a folder that this user alone can write",
    "measure/report/page/html_document.py": "texts of this package",
    "models/specs/ship_architectures.py": "its own text",
    "training/fitting/memory_advice.py": "standard input, from the training",
    "base/vocabulary/lazy_names.py": "source code of this package",
}
PARSERS = {("json", "load"), ("json", "loads"), ("tomllib", "load"), ("tomllib", "loads"), ("np", "memmap"),
           ("pickle", "load"), ("pickle", "loads"), ("os", "open"), ("np", "load"), ("np", "fromfile"), ("torch", "load")}  # fmt: skip
METHODS = {"read_text", "read_bytes", "open"}


def reads(tree: ast.AST) -> list[str]:
    """The places in which a file opens or parses a content by itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            holder = node.value.id if isinstance(node.value, ast.Name) else ""
            is_yaml = holder in ("yaml", "pickle") and ("load" in node.attr.lower() or node.attr == "Unpickler")
            if (holder, node.attr) in PARSERS or is_yaml or node.attr in METHODS:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Name) and node.id == "open":
            found.append(f"line {node.lineno}: open")
        elif isinstance(node, ast.ImportFrom) and node.module in ("json", "tomllib", "yaml", "pickle"):
            found.append(f"line {node.lineno}: from {node.module} import …")
    return found


def test_files_are_read_by_the_one_reader() -> None:
    found = {str(path.relative_to(SOURCE)): reads(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")}
    unknown = {name: places for name, places in found.items() if places and name not in OWN_READERS}
    assert not unknown, f"read with base/files/data_file.py, or say here why not: {json.dumps(unknown, indent=1)}"
    assert not [name for name in OWN_READERS if not found.get(name)], "these read nothing by themselves"


@pytest.mark.parametrize(
    "code",
    [
        "json.loads(path.read_bytes())",
        "tomllib.load(file)",
        "yaml.full_load(text)",
        "yaml.SafeLoader(text)",
        "pickle.Unpickler(file)",
        "list(map(json.loads, lines))",
        "open(path)",
        "path.open()",
        "os.open(path, 0)",
        "from json import loads",
    ],
)
def test_every_way_to_read_by_oneself_is_found(code: str) -> None:
    assert reads(ast.parse(code))
