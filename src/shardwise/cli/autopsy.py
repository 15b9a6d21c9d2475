"""`shardwise autopsy`: a job hung or crashed. Which rank stopped, and where?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.autopsy.findings import Finding
    from shardwise.autopsy.record import RankRecord


def autopsy(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder with one record per rank: a run folder, or PyTorch's flight recorder dumps."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Find the rank that stopped, after a job hung or crashed.

    Compares the collectives that each rank had issued.
    """
    from shardwise.autopsy.findings import verdict
    from shardwise.autopsy.record_folder import read_records

    records = read_records(folder)
    findings = verdict(records)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
        return
    _print(records, findings)


def _print(records: "list[RankRecord]", findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for finding in findings:
        head = f"{finding.group}: " if finding.group else ""
        console.print(_plain(f"{head}{finding.text}"), highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "group", "collectives", "the last one", "over"):
        table.add_column(column)
    for record in records:
        for name, group in record.groups.items():
            last = group.issued[-1]
            table.add_row(
                *(str(record.rank), _plain(name), f"{last.number:,}", _plain(last.name)),
                "yes" if last.ended else "no",
                style=None,
            )
    console.print()
    console.print(table, markup=False)


def _plain(text: str) -> str:
    """Without what a terminal would obey: a record may come from anybody."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
