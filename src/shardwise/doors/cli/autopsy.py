"""`shardwise autopsy`: finds the rank that stopped, and where, after a job hung or crashed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from shardwise.base.vocabulary.printable import printable
from shardwise.doors.cli.shared_options import AsJson
from shardwise.doors.cli.terminal import print_line

if TYPE_CHECKING:
    from shardwise.comm.autopsy.findings import Finding
    from shardwise.comm.autopsy.record import RankRecord


def autopsy(
    folder: Annotated[
        Path,
        Argument(
            metavar="DIR", help="A folder with one record per rank: a run folder, or PyTorch's flight recorder dumps."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Find the rank that stopped, after a job hung or crashed.

    Compares the collectives that each rank had issued.
    """
    from shardwise.comm.autopsy.findings import replaced, verdict
    from shardwise.comm.autopsy.own_record import read_restarts
    from shardwise.comm.autopsy.record_folder import read_records

    records = read_records(folder)
    findings = [*verdict(records), *replaced(read_restarts(folder))]
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(records, findings)


def _print(records: "list[RankRecord]", findings: "list[Finding]") -> None:
    from rich.console import Console

    from shardwise.measure.report.text.plain_table import plain_table

    for finding in findings:
        print_line(printable(f"{finding.group}: {finding.text}" if finding.group else finding.text))
    if not records:
        print_line("The last start left no record: it has ended well, is still running, or was killed.")
        return
    heads = ("rank", "group", "collectives", "last collective", "completed")
    table = plain_table(heads, wraps=heads)
    for record in records:
        for name, group in record.groups.items():
            last = group.issued[-1]
            cells = (str(record.rank), printable(name), f"{last.number:,}", printable(last.name))
            table.add_row(*cells, "yes" if last.ended else "no")
    console = Console()
    console.print()
    console.print(table, markup=False)
