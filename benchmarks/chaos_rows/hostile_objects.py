"""What row 16 tries: checkpoints, plans, configs, results, records and names made by somebody who means harm.

A case is a function that puts its object into a folder and returns the commands to try on it.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure.report.sample_bench import sample_bench
from state.checkpoint.test_checkpoints import rewritten, saved_folder

from shardwise.comm.autopsy.own_record import path_of, write_record
from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord

Command = tuple[str, ...]
Case = Callable[[Path], list[Command]]
TAGS = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
BIG, SPARSE_BYTES = 2**62, 20 * 2**30
DEEP = b'{"a":' * 200_000
FILE = "rank-00000.safetensors"


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._path}'",)


def sparse(path: Path) -> None:
    """Make a file of many zeros that takes no room."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, *, to: str = "/dev/zero") -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def pickled(path: Path, *, parents: int) -> None:
    """Write a pickle that would leave a file so many folders up."""
    path.write_bytes(pickle.dumps(Payload(path.parents[parents] / "ran")))


def written(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


# What no reader of a file may hang on, or take all memory for.
FILES: dict[str, Callable[[Path], Any]] = {"zeros": sparse, "a FIFO": fifo, "/dev/zero": link, "deep": written(DEEP)}


# Checkpoints


def checkpoint_case(change: Callable[[Path], Any]) -> Case:
    """A checkpoint that `change(folder of the step)` has changed."""

    def make(folder: Path) -> list[Command]:
        saved_folder(folder / "checkpoints")
        step = folder / "checkpoints" / "step-00000001"
        change(step)
        export = ("checkpoint", "export", str(step), "--out", str(folder / "out.safetensors"))
        return [("checkpoint", "inspect", str(step), "--tensors"), ("checkpoint", "verify", str(step)), export]

    return make


def manifest_case(change: Callable[[dict[str, Any]], Any]) -> Case:
    """A manifest with another body, and the checksum of that."""
    return checkpoint_case(lambda step: rewritten(step, change))


def tensors_case(change: Callable[[Path], Any]) -> Case:
    """The file of tensors is something else; the manifest has its size and checksum where it can."""

    def changed(step: Path) -> None:
        path = step / FILE
        change(path)
        if path.is_file() and path.stat().st_size < 2**24:
            known = {"num_bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
            rewritten(step, lambda body: body["files"][FILE].update(known))

    return checkpoint_case(changed)


def rename_file(body: dict[str, Any], *, to: str) -> None:
    body["files"] = {to: body["files"][FILE]}
    for tensor in body["tensors"].values():
        for box in tensor["boxes"]:
            box[2] = to


def reshape(body: dict[str, Any], *, shape: list[Any]) -> None:
    body["tensors"]["model.first.weight"] |= {"shape": shape, "boxes": [[[0] * len(shape), shape, FILE]]}


def header(path: Path, *, text: bytes, length: int | None = None) -> None:
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 64)


def entry(shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"model.first.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


_UP = ("../../victim", "../../../victim", "a/../../victim", "/etc/hostname")
NAMES = (*_UP, "..", ".", "", "a\0b", "a\nb", "x" * 5000)
_LARGE: list[list[Any]] = [[BIG], [2**31, 2**31], [10**30], [1] * 5000, [5, 3, BIG]]
SHAPES = [*_LARGE, [-1, 3], [True], ["5"], [5.0, 3.0], [[5]]]
DTYPES = ("__class__", "os", "load", "Tensor", "nn", "float32; import os", "x" * 100_000, 7, None, ["float32"])
CONTENTS: dict[str, tuple[Any, ...]] = {
    "step": (-1, "1; rm", 10**400, None, [1], 1e308),
    "num_ranks": (10**12, -1, "2", None),
    "aliases": ({"a": "b", "b": "a"}, {"a": 7}, ["a"], {"../x": "/etc"}),
    "plan": ({"strategy": TAGS}, [], "x", {"mesh": 3}, {}),
    "parameters": ({"a": [[BIG], "x"]}, {"a": 3}, [[]], {"a": [["q"], 3]}),
    "optimizer": ({"kind": "os.system"}, [1]),
    "own": ("x" * 1000,),
    "progress": ({"__tuple__": {"__tuple__": []}},),
    "__reduce__": (["os.system", "true"],),
}
HEADERS: dict[str, dict[str, Any]] = {
    "a long header": {"text": b"{}", "length": BIG},
    "an almost long header": {"text": b"{}", "length": 99_999_999},
    "a deep header": {"text": DEEP},
    "a large shape": {"text": entry([BIG], [0, 8])},
    "outside": {"text": entry([5, 3], [10**12, 10**12 + 60])},
    "negative": {"text": entry([5, 3], [-60, 0])},
}


def checkpoints() -> dict[str, Case]:
    cases = {f"file named {name[:20]!r}": manifest_case(partial(rename_file, to=name)) for name in NAMES}
    cases |= {f"shape {str(shape)[:20]}": manifest_case(partial(reshape, shape=shape)) for shape in SHAPES}
    for dtype in DTYPES:
        cases[f"dtype {str(dtype)[:20]!r}"] = manifest_case(
            lambda body, dtype=dtype: body["tensors"]["model.first.weight"].update(dtype=dtype)
        )
    for key, values in CONTENTS.items():
        for number, value in enumerate(values):
            cases[f"contents: {key} {number}"] = manifest_case(
                lambda body, key=key, value=value: body["contents"].update({key: value})
            )
    for size in (BIG, -1, "1"):
        cases[f"size {size}"] = manifest_case(lambda body, size=size: body["files"][FILE].update(num_bytes=size))
    for name, change in {**FILES, "a pickle": partial(pickled, parents=3)}.items():
        cases[f"manifest: {name}"] = checkpoint_case(lambda step, change=change: change(step / "manifest.json"))
        cases[f"tensors: {name}"] = tensors_case(change)
    return cases | {f"tensors: {name}": tensors_case(partial(header, **values)) for name, values in HEADERS.items()}


# Files that commands read


def file_case(name: str, change: Callable[[Path], Any], *commands: Command) -> Case:
    """A file in the folder; commands name it FILE, and the folder FOLDER."""

    def make(folder: Path) -> list[Command]:
        change(folder / name)
        values = {"FILE": str(folder / name), "FOLDER": str(folder)}
        return [tuple(values.get(word, word) for word in command) for command in commands]

    return make


READERS: dict[str, Command] = {
    "plan": ("doctor", "FILE"),
    "config": ("train", "FILE"),
    "cluster": ("plan", "gpt2-124m", "--cluster", "FILE"),
    "devices": ("plan", "gpt2-124m", "--cluster", "8xh100-80gb", "--devices", "FILE"),
}
TASK = '[task]\nmodel = "gpt-tiny"\ndataset = "stdlib"\n[train]\nsteps = 1\n'


def configs() -> dict[str, Case]:
    contents = {
        **FILES,
        "deep": written(b"a = " + b"[" * 200_000),
        "keys": written(b"a." * 2_000 + b"b = 1"),
        "a long number": written(b"micro_batch = " + b"9" * 100_000),
    }
    cases = {
        f"{kind}: {name}": file_case("file.toml", change, command)
        for kind, command in READERS.items()
        for name, change in contents.items()
    }
    for what in ("/dev/zero", "/proc/self/mem", "/etc"):
        content = f'{TASK}[plan]\nfile = "{what}"\n'.encode()
        cases[f"config: plan.file = {what}"] = file_case("file.toml", written(content), READERS["config"])
    return cases


def bench_case(change: Callable[[dict[str, Any]], Any]) -> Case:
    def make(folder: Path) -> list[Command]:
        path = sample_bench(name="a name").save(folder)
        data = json.loads(path.read_text())
        path.write_text(json.dumps(change(data) or data))
        return [("report", str(folder), "--trace", str(folder / "trace.json"))]

    return make


def set_everywhere(value: Any, *, to: str) -> Any:
    """Return a bench all of whose texts are `to`."""
    if isinstance(value, dict):
        return {name: set_everywhere(part, to=to) for name, part in value.items()}
    if isinstance(value, list):
        return [set_everywhere(part, to=to) for part in value]
    return to if isinstance(value, str) else value


def results() -> dict[str, Case]:
    changes: dict[str, dict[str, Any]] = {f"{key} with tags": {key: TAGS} for key in ("name", "command", "made", "why")}
    for key in ("num_ranks", "capacity_bytes", "recommended"):
        changes |= {f"{key} = {value!r}": {key: value} for value in (BIG, -1, 1e308, "x", None, [], {})}
    cases = {
        f"bench: {name}": bench_case(lambda data, values=values: data.update(values))
        for name, values in changes.items()
    }
    cases["bench: settings with tags"] = bench_case(lambda data: data["settings"].update({TAGS: TAGS}))
    cases["bench: machine with tags"] = bench_case(lambda data: data["machine"].update({TAGS: [TAGS]}))
    cases["bench: tags everywhere"] = bench_case(partial(set_everywhere, to=TAGS))
    for name, change in {**FILES, "a pickle": partial(pickled, parents=1)}.items():
        cases[f"bench: {name}"] = file_case("bench.json", change, ("report", "FOLDER"))
    return cases


def _record(path: Path, **changes: object) -> None:
    issued = [Issued(number=1, name="\x1b[2J[red]gather a", ended=False)]
    fields = {"rank": 0, "groups": {"world": GroupRecord(ranks=(0, BIG), issued=issued)}, "state": "\x1b]0;x\x07"}
    write_record(path.parent, RankRecord(**{**fields, **changes}))


def records() -> dict[str, Case]:
    own, dump = path_of(Path(), rank=0).name, "nccl_trace_rank_0"
    no_numbers = json.dumps({"shardwise": 1, "rank": None}).encode()
    contents: dict[str, tuple[str, Callable[[Path], Any]]] = {
        **{f"record: {name}": (own, change) for name, change in FILES.items()},
        "record: not JSON": (own, written(b"\xff\xfe")),
        "record: a large number": (own, written(b'{"shardwise": 1, "rank": ' + b"9" * 100_000 + b"}")),
        "record: no numbers": (own, written(no_numbers)),
        "record: control characters": (own, _record),
        "record: a rank below 0": (own, partial(_record, rank=-1)),
        "dump: code": (dump, partial(pickled, parents=1)),
        "dump: a huge file": (dump, sparse),
        "dump: deep": (f"{dump}.json", written(b'{"entries":' * 200_000)),
    }
    commands = ("autopsy", "FOLDER"), ("autopsy", "FOLDER", "--json")
    return {what: file_case(name, change, *commands) for what, (name, change) in contents.items()}


# Names


def hugging_face(folder: Path) -> list[Command]:
    """A config.json that names code to import."""
    where = folder / "model"
    where.mkdir()
    code = f"import pathlib\npathlib.Path({str(folder.parent / 'ran')!r}).touch()\nclass C: pass\n"
    (where / "code.py").write_text(code)
    named = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"}
    (where / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": named}))
    return [("plan", f"hf:{where}", "--cluster", "8xh100-80gb")]


def names() -> dict[str, Case]:
    models = [
        *("../../etc/passwd", "params:1e400", "params:" + "9" * 5000, "hf:/etc", "hf:../..", "python:os:system"),
        *("python::", "python:/etc/passwd:x", "torchvision:os.system", "torchvision:__class__", "timm:../../x"),
        *("\x1b[2J", "a\nb", "x" * 100_000),
    ]
    clusters = ["9" * 5000 + "xh100", "8x" + "h" * 100_000, "/etc", "8xh100\n", "\x1b[2J", "8x8x8x8xh100"]
    asked = [("model", name, (name, "--cluster", "8xh100-80gb")) for name in models]
    asked += [("cluster", name, ("gpt2-124m", "--cluster", name)) for name in (*clusters, "/proc/self/mem")]
    cases: dict[str, Case] = {
        f"{kind} {name[:20]!r}": lambda folder, words=words: [("plan", *words)] for kind, name, words in asked
    }
    return {**cases, "hf: a config with code": hugging_face}


def all_cases() -> dict[str, Case]:
    return checkpoints() | configs() | results() | records() | names()
