"""What row 16 tries: checkpoints, plans, configs, results and names made by somebody who means harm.

A case is a function that puts its object into a folder and gives the commands to try on it.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.test_checkpoints import rewritten, saved_folder
from report.sample_bench import sample_bench

Command = tuple[str, ...]
Case = Callable[[Path], list[Command]]
TAGS = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
BIG, SPARSE_BYTES = 2**62, 20 * 2**30
FILE = "rank-00000.safetensors"


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._path}'",)


def sparse(path: Path) -> None:
    """A file of many zeros that takes no room."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, *, to: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def on_checkpoint(folder: Path) -> list[Command]:
    path = str(folder / "checkpoints" / "step-00000001")
    export = ("checkpoint", "export", path, "--out", str(folder / "out.safetensors"))
    return [("checkpoint", "inspect", path, "--tensors"), ("checkpoint", "verify", path), export]


def manifest_case(change: Callable[[dict[str, Any]], Any]) -> Case:
    """A manifest with another body, and the checksum of that."""

    def make(folder: Path) -> list[Command]:
        saved_folder(folder / "checkpoints")
        rewritten(folder / "checkpoints" / "step-00000001", change)
        return on_checkpoint(folder)

    return make


def file_case(name: str, change: Callable[[Path], Any]) -> Case:
    """A file of the checkpoint is something else; the manifest has its size and checksum where it can."""

    def make(folder: Path) -> list[Command]:
        saved_folder(folder / "checkpoints")
        step = folder / "checkpoints" / "step-00000001"
        change(step / name)
        path = step / FILE
        if name == FILE and path.is_file() and path.stat().st_size < 2**24:
            known = {"num_bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
            rewritten(step, lambda body: body["files"][FILE].update(known))
        return on_checkpoint(folder)

    return make


def rename_file(body: dict[str, Any], *, to: str) -> None:
    body["files"] = {to: body["files"][FILE]}
    for tensor in body["tensors"].values():
        for box in tensor["boxes"]:
            box[2] = to


def reshape(body: dict[str, Any], *, shape: list[Any]) -> None:
    tensor = body["tensors"]["model.first.weight"]
    tensor["shape"] = shape
    tensor["boxes"] = [[[0] * len(shape), shape, FILE]]


def header(path: Path, *, text: bytes, length: int | None = None, after: int = 64) -> None:
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * after)


def entry(shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"model.first.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(path.parents[3] / "ran")))


NAMES = (
    "../../victim",
    "/etc/hostname",
    "..",
    ".",
    "",
    "a/../../victim",
    "a\0b",
    "a\nb",
    "x" * 5000,
    "../../../victim",
)
SHAPES: list[list[Any]] = [
    [BIG],
    [2**31, 2**31],
    [-1, 3],
    [10**30],
    [1] * 5000,
    [5, 3, BIG],
    [True],
    ["5"],
    [5.0, 3.0],
    [[5]],
]
DTYPES = ("__class__", "os", "load", "Tensor", "nn", "float32; import os", "x" * 100_000, 7, None, ["float32"])
CONTENTS: dict[str, Any] = {
    **{f"step {value!r}"[:30]: {"step": value} for value in (-1, "1; rm", 10**400, None, [1], 1e308)},
    **{f"num_ranks {value!r}": {"num_ranks": value} for value in (10**12, -1, "2", None)},
    **{
        f"aliases {number}": {"aliases": value}
        for number, value in enumerate(({"a": "b", "b": "a"}, {"a": 7}, ["a"], {"../x": "/etc"}))
    },
    **{
        f"plan {number}": {"plan": value} for number, value in enumerate(({"strategy": TAGS}, [], "x", {"mesh": 3}, {}))
    },
    **{
        f"parameters {number}": {"parameters": value}
        for number, value in enumerate(({"a": [[BIG], "x"]}, {"a": 3}, [[]], {"a": [["q"], 3]}))
    },
    "optimizer": {"optimizer": {"kind": "os.system"}},
    "optimizer list": {"optimizer": [1]},
    "own": {"own": "x" * 1000},
    "progress": {"progress": {"__tuple__": {"__tuple__": []}}},
    "unknown": {"__reduce__": ["os.system", "true"]},
}


def checkpoints() -> dict[str, Case]:
    cases = {f"file named {name[:20]!r}": manifest_case(partial(rename_file, to=name)) for name in NAMES}
    cases |= {f"shape {str(shape)[:20]}": manifest_case(partial(reshape, shape=shape)) for shape in SHAPES}
    for dtype in DTYPES:
        cases[f"dtype {str(dtype)[:20]!r}"] = manifest_case(
            lambda body, dtype=dtype: body["tensors"]["model.first.weight"].update(dtype=dtype)
        )
    for name, values in CONTENTS.items():
        cases[f"contents: {name}"] = manifest_case(lambda body, values=values: body["contents"].update(values))
    for num_bytes in (BIG, -1, "1"):
        cases[f"size {num_bytes}"] = manifest_case(
            lambda body, num_bytes=num_bytes: body["files"][FILE].update(num_bytes=num_bytes)
        )
    deep = b'{"a":' * 200_000
    cases |= {
        "manifest: a pickle": file_case("manifest.json", pickled),
        "manifest: zeros": file_case("manifest.json", sparse),
        "manifest: a FIFO": file_case("manifest.json", fifo),
        "manifest: /dev/zero": file_case("manifest.json", partial(link, to="/dev/zero")),
        "manifest: deep": file_case("manifest.json", lambda path: path.write_bytes(deep)),
        "tensors: a pickle": file_case(FILE, pickled),
        "tensors: zeros": file_case(FILE, sparse),
        "tensors: a FIFO": file_case(FILE, fifo),
        "tensors: /dev/zero": file_case(FILE, partial(link, to="/dev/zero")),
        "tensors: a long header": file_case(FILE, partial(header, text=b"{}", length=BIG)),
        "tensors: an almost long header": file_case(FILE, partial(header, text=b"{}", length=99_999_999)),
        "tensors: deep": file_case(FILE, partial(header, text=deep)),
        "tensors: a large shape": file_case(FILE, partial(header, text=entry([BIG], [0, 8]))),
        "tensors: outside": file_case(FILE, partial(header, text=entry([5, 3], [10**12, 10**12 + 60]))),
        "tensors: negative": file_case(FILE, partial(header, text=entry([5, 3], [-60, 0]))),
    }
    return cases


def toml_case(content: bytes | Callable[[Path], Any], *command: str) -> Case:
    """A TOML file that a command reads."""

    def make(folder: Path) -> list[Command]:
        path = folder / "file.toml"
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        return [tuple(word.replace("FILE", str(path)) for word in command)]

    return make


TASK = b'[task]\nmodel = "gpt-tiny"\ndataset = "stdlib"\n[train]\nsteps = 1\n'
READERS: dict[str, tuple[str, ...]] = {
    "plan": ("doctor", "FILE"),
    "config": ("train", "FILE"),
    "cluster": ("plan", "gpt2-124m", "--cluster", "FILE"),
    "devices": ("plan", "gpt2-124m", "--cluster", "8xh100-80gb", "--devices", "FILE"),
}


def configs() -> dict[str, Case]:
    cases = {}
    for kind, command in READERS.items():
        for name, content in {
            "deep": b"a = " + b"[" * 200_000,
            "keys": b"a." * 2_000 + b"b = 1",
            "zeros": sparse,
            "a FIFO": fifo,
            "/dev/zero": partial(link, to="/dev/zero"),
            "a long number": b"micro_batch = " + b"9" * 100_000,
        }.items():
            cases[f"{kind}: {name}"] = toml_case(content, *command)
    for what in ("/dev/zero", "/proc/self/mem", "/etc"):
        cases[f"config: plan.file = {what}"] = toml_case(TASK + f'[plan]\nfile = "{what}"\n'.encode(), "train", "FILE")
    return cases


def set_everywhere(value: Any, *, to: str) -> Any:
    """All texts of a bench, and the names in its tables, become `to`."""
    if isinstance(value, dict):
        return {name: set_everywhere(part, to=to) for name, part in value.items()}
    if isinstance(value, list):
        return [set_everywhere(part, to=to) for part in value]
    return to if isinstance(value, str) else value


def bench_case(change: Callable[[dict[str, Any]], Any]) -> Case:
    def make(folder: Path) -> list[Command]:
        path = sample_bench(name="a name").save(folder)
        data = json.loads(path.read_text())
        path.write_text(json.dumps(change(data) or data))
        return [("report", str(folder), "--trace", str(folder / "trace.json"))]

    return make


def bench_file(change: Callable[[Path], Any]) -> Case:
    def make(folder: Path) -> list[Command]:
        change(folder / "bench.json")
        return [("report", str(folder))]

    return make


def results() -> dict[str, Case]:
    cases = {
        f"bench: {key} is text with tags": bench_case(lambda data, key=key: data.update({key: TAGS}))
        for key in ("name", "command", "made", "why")
    }
    cases["bench: settings with tags"] = bench_case(lambda data: data["settings"].update({TAGS: TAGS}))
    cases["bench: machine with tags"] = bench_case(lambda data: data["machine"].update({TAGS: [TAGS]}))
    cases["bench: tags everywhere"] = bench_case(partial(set_everywhere, to=TAGS))
    for value in (BIG, -1, 1e308, "x", None, [], {}):
        for key in ("num_ranks", "capacity_bytes", "recommended"):
            cases[f"bench: {key} = {value!r}"] = bench_case(
                lambda data, key=key, value=value: data.update({key: value})
            )
    cases |= {
        "bench: a pickle": bench_file(lambda path: path.write_bytes(pickle.dumps(Payload(path.parents[1] / "ran")))),
        "bench: zeros": bench_file(sparse),
        "bench: a FIFO": bench_file(fifo),
        "bench: /dev/zero": bench_file(partial(link, to="/dev/zero")),
        "bench: deep": bench_file(lambda path: path.write_bytes(b'{"a":' * 200_000)),
    }
    return cases


def name_case(*command: str) -> Case:
    return lambda folder: [command]


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
    models = (
        *(
            "../../etc/passwd",
            "params:1e400",
            "params:" + "9" * 5000,
            "hf:/etc",
            "hf:../..",
            "python:os:system",
            "python::",
        ),
        *(
            "python:/etc/passwd:x",
            "torchvision:os.system",
            "torchvision:__class__",
            "timm:../../x",
            "\x1b[2J",
            "a\nb",
            "x" * 100_000,
        ),
    )
    cases = {f"model {name[:20]!r}": name_case("plan", name, "--cluster", "8xh100-80gb") for name in models}
    clusters = (
        "9" * 5000 + "xh100",
        "8x" + "h" * 100_000,
        "/etc",
        "8xh100\n",
        "\x1b[2J",
        "8x8x8x8xh100",
        "/proc/self/mem",
    )
    cases |= {f"cluster {name[:20]!r}": name_case("plan", "gpt2-124m", "--cluster", name) for name in clusters}
    cases["hf: a config with code"] = hugging_face
    return cases


def all_cases() -> dict[str, Case]:
    return checkpoints() | configs() | results() | names()
