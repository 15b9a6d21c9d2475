"""`shardwise report`: a bench as an HTML page, and as a trace."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.doors.cli.terminal import check_output, write_output

_PAGE = "report.html"


def report(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder that `shardwise bench --out` made.")],
    out: Annotated[Path | None, Option(help=f"Where to write the page (default: DIR/{_PAGE}).")] = None,
    trace: Annotated[Path | None, Option(help="Also write a trace of the steps for https://ui.perfetto.dev.")] = None,
) -> None:
    """Write a bench as one HTML page that opens offline."""
    from shardwise.measure.bench.results import load_bench
    from shardwise.measure.report.page.document import page_of
    from shardwise.measure.report.perfetto import trace_of

    bench = load_bench(folder)
    page = out if out is not None else (folder if folder.is_dir() else folder.parent) / _PAGE
    check_output("--out", page)
    if trace is not None:
        check_output("--trace", trace)
    # JSON can hold half of a surrogate pair, which UTF-8 cannot encode.
    write_output(page, page_of(bench).encode(errors="replace"))
    if trace is not None:
        write_output(trace, json.dumps(trace_of(bench), allow_nan=False, separators=(",", ":")).encode())
