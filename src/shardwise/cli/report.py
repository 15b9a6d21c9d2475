"""`shardwise report`: a page of a bench, and a trace of it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import InvalidData
from shardwise.files.atomic import atomic_write

_PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `shardwise bench --out` made.")],
    out: Annotated[Path | None, typer.Option("--out", help=f"Where to write the page (default: DIR/{_PAGE}).")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Also write a trace of the steps for https://ui.perfetto.dev.")
    ] = None,
) -> None:
    """Write a bench as one HTML page that opens offline."""
    from shardwise.bench.results import load_bench
    from shardwise.report.page import page_of
    from shardwise.report.perfetto import trace_of

    bench = load_bench(folder)
    page = out if out is not None else (folder if folder.is_dir() else folder.parent) / _PAGE
    _check("--out", page)
    if trace is not None:
        _check("--trace", trace)
    # A bench may hold what UTF-8 cannot say: half of a surrogate pair, which JSON can.
    _write(page, page_of(bench).encode(errors="replace"))
    if trace is not None:
        _write(trace, json.dumps(trace_of(bench), allow_nan=False, separators=(",", ":")).encode())


def _check(option: str, path: Path) -> None:
    if path.is_dir():
        raise InvalidData(f"{option} {path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise InvalidData(f"{option} {path}: there is no folder {path.parent}")


def _write(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise InvalidData(f"{path}: cannot be written ({error.strerror})") from error
    print(path)
