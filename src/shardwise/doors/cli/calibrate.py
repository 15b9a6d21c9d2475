"""`shardwise calibrate`: measures this machine's device and writes its table."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from shardwise.base.errors import InvalidCluster, InvalidData
from shardwise.base.files.data_file import UnreadableFile, read_json
from shardwise.doors.cli.shared_options import DeviceKind, device_kind
from shardwise.doors.cli.terminal import check_output


def calibrate(
    out: Annotated[Path, Option(help="The TOML file to write.")] = Path("device.toml"),
    device: DeviceKind = None,
    num_ranks: Annotated[
        int | None, Option("--ranks", min=1, help="Ranks that measure together (default: all GPUs, or one CPU).")
    ] = None,
    like: Annotated[
        str | None, Option(help="The device of `shardwise devices` to take unmeasured values from.")
    ] = None,
    nccl_tests: Annotated[Path | None, Option(help="Output of all_reduce_perf, for the links between devices.")] = None,
    rows: Annotated[Path | None, Option(help="Measurements as JSON: read if the file exists, else written.")] = None,
    limit_seconds: Annotated[float, Option(min=1.0, help="Stop measuring after this long.")] = 240.0,
) -> None:
    """Measure this device for the planner.

    Takes a few minutes: kernels, memory, dispatch, optimizers and, over several ranks, collectives.
    """
    from shardwise.hardware.measuring.device_file import device_table, write_table
    from shardwise.hardware.measuring.nccl_tests import read_nccl_tests

    link_rows = read_nccl_tests(nccl_tests) if nccl_tests is not None else None
    check_output("--out", out)
    if rows is not None and rows.exists():
        measured = _read(rows)
    else:
        with _progress() as progress:
            measured = _measure(device, num_ranks=num_ranks, limit_seconds=limit_seconds, progress=progress)
        if rows is not None:
            rows.write_text(json.dumps(measured).replace('{"name"', '\n{"name"') + "\n")
    write_table(device_table(measured, like=like, link_rows=link_rows), out)
    failed = sum("error" in row for row in measured["rows"])
    print(f"{out}: {measured['title']}, {len(measured['rows']) - failed} measurements in {measured['seconds']:.0f} s")
    if failed or measured["left_out"]:
        print(f"  {failed} kernels could not be run here, and {measured['left_out']} were skipped for lack of time")
    print(f"  shardwise plan MODEL --cluster {out}")


def _measure(
    device: str | None, *, num_ranks: int | None, limit_seconds: float, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    import torch

    from shardwise.hardware.measuring.calibrate import measure_device

    kind = device_kind(device, on_cpu="measures the CPU")
    available = torch.cuda.device_count() if kind == "cuda" else None
    ranks = num_ranks or available or 1
    if available is not None and ranks > available:
        raise InvalidCluster(f"--ranks {ranks}: there are {available} GPUs here")
    if ranks == 1:
        place = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        return measure_device(place, limit_seconds=limit_seconds, progress=progress)
    from shardwise.hardware.measuring.measure_ranks import measure_ranks

    return measure_ranks(kind, num_ranks=ranks, limit_seconds=limit_seconds, progress=progress)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _read(path: Path) -> dict[str, Any]:
    try:
        measured = read_json(path)
    except UnreadableFile as error:
        raise InvalidData(f"{path}: {error}") from error
    if not isinstance(measured, dict):
        raise InvalidData(f"{path}: not a file of measurements of `shardwise calibrate`")
    return measured
