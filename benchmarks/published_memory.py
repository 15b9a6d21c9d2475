"""Peaks of memory that others published, of torch's engines and of LoRA and QLoRA, and what is predicted for them.

    python benchmarks/published_memory.py --published DIR

Peaks are of allocated memory. Rows are those of published.py that have one. Ours on one H200 are counted too: with
torch's engine (results/validate_memory_h200.json), and QLoRA (results/qlora_memory_h200.json).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from memory_predictions import compare
from published import read
from rows import table
from validate_time import Checked, check

RESULTS = Path(__file__).parent / "results"
CLOSE = 0.05


def published(folder: Path) -> list[Checked]:
    return check([row for row in read(folder)[0] if row.peak_bytes is not None])


def ours() -> Iterator[float]:
    """Yield the error of each row that was measured on one H200."""
    rows = json.loads((RESULTS / "validate_memory_h200.json").read_text())["rows"]
    yield from (row["errors"]["allocated"] for row in compare(row for row in rows if row["engine"] == "torch"))
    for row in json.loads((RESULTS / "qlora_memory_h200.json").read_text())["rows"]:
        yield row["allocated"]["predicted_bytes"] / row["allocated"]["measured_bytes"] - 1


def lines(found: Sequence[Checked]) -> Iterator[list[str]]:
    for one in found:
        assert one.row.peak_bytes is not None
        plan, model = one.row.plan, one.row.model.rpartition(":")[2].replace("_", "-")
        how = "".join(
            f", {text}"
            for text in (
                plan.strategy if one.candidate.cluster.num_ranks > 1 else "",
                "compiled" if one.row.is_compiled else "",
                "recompute" if plan.recompute == "full" else "",
                f"{one.row.loss} loss" if one.row.loss != "usual" else "",
            )
            if text
        )
        sizes = [f"{size / 1e9:.2f}" for size in (one.row.peak_bytes, one.candidate.memory.allocated_bytes)]
        what = f"{one.row.table}: {model}, {plan.micro_batch} samples{how}"
        yield [what, *sizes, f"{one.memory_error:+.1%}"]


def counted(name: str, errors: Sequence[float]) -> str:
    close = sum(abs(error) <= CLOSE for error in errors)
    return f"{name}: {close} of {len(errors)} within {CLOSE:.0%} ({close / len(errors):.0%})"


def report(found: Sequence[Checked]) -> str:
    theirs, own = [one.memory_error for one in found], list(ours())
    counts = [
        counted("Published", theirs),
        counted("measured on one H200 with torch's engine, and QLoRA", own),
        counted("together", [*theirs, *own]),
    ]
    head = ("training", "published GB", "predicted GB", "error")
    return "\n".join([table(head, list(lines(found))), "", f"{'; '.join(counts)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="the folder of published tables")
    print(report(published(parser.parse_args().published)))


if __name__ == "__main__":
    main()
