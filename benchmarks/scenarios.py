"""Ways to train, each the same script on two ranks under every engine, compared with one process.

python benchmarks/scenarios.py                     all rows; a few minutes on 2 quiet cores
python benchmarks/scenarios.py --only LoRA,Muon    rows whose names contain one of these; the others keep their results
python benchmarks/scenarios.py --rest              rows that have no result yet

Results go to benchmarks/results/scenarios.json and docs/scenarios.md. The exit code is 1 if a training of ours is
neither right nor refused.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "dist"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from ranks import RankFailed, run_ranks, shut_down  # noqa: E402
from scenario_rows.rank_body import GROUPS, train  # noqa: E402
from scenario_rows.runners import NUM_RANKS, PEERS, STRATEGIES, Runner  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scenarios.json"
PAGE = ROOT / "docs" / "scenarios.md"
BEGIN, END = "<!-- section scenarios -->", "<!-- end of scenarios -->"
ENGINES = (*STRATEGIES, *PEERS)
# Of the largest value of a tensor. What sums in another order is closer; what is wrong is farther away.
_CLOSE = 1e-5


def verdict(found: list[dict[str, Any]], expected: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """equal, close (with the distance), wrong (with the distance), refused or failed (with the line)."""
    for rank in found:
        if "line" in rank:
            word = "refused" if rank["kind"] == "shardwise" else "failed"
            return {"verdict": word, "line": _short(rank["line"])}
    far = max(_distance(rank["weights"], expected) for rank in found)
    return {"verdict": "equal" if far == 0 else "close" if far <= _CLOSE else "wrong", "distance": far}


def _distance(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    if set(weights) != set(expected):
        return float("inf")
    return max(
        float((weights[name].to(value.dtype) - value).abs().max() / value.abs().max().clamp(min=1e-30))
        if value.is_floating_point() or value.is_complex()
        else float(not torch.equal(weights[name], value))
        for name, value in expected.items()
    )


def _short(text: str) -> str:
    words = re.sub(r"^[A-Za-z]+: ", "", " ".join(text.split()))
    return words if len(words) <= 300 else words[:297] + "…"


def run(group: str, name: str) -> dict[str, Any]:
    (alone,) = run_ranks(train, num_ranks=1, args=(group, name, Runner.name))
    row: dict[str, Any] = {"group": group, "name": name}
    for engine in ENGINES:
        try:
            found = run_ranks(train, num_ranks=NUM_RANKS, args=(group, name, engine), timeout_seconds=60.0)
        except RankFailed as error:
            row[engine] = {"verdict": "failed", "line": _short(str(error).splitlines()[0])}
        else:
            row[engine] = verdict(found, alone["weights"])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a table for each group, and what was refused."""
    lines, refusals = [], []
    for group in GROUPS:
        lines += ["", f"| {group} | {' | '.join(f'`{engine}`' for engine in ENGINES)} |", "|---" * 6 + "|"]
        for row in (row for row in rows if row["group"] == group):
            lines.append(f"| {row['name']} | {' | '.join(_cell(row[engine]) for engine in ENGINES)} |")
            said = {row[engine]["line"] for engine in STRATEGIES if row[engine]["verdict"] == "refused"}
            refusals += [f"- {row['name']}: “{line}”" for line in sorted(said)]
    return "\n".join([*lines, "", "What the refusals say:" if refusals else "", "", *refusals])


def _cell(result: Mapping[str, Any]) -> str:
    word = result["verdict"]
    return f"{word}, {result['distance']:.0e}" if word in ("close", "wrong") else word


def summary(rows: list[dict[str, Any]]) -> str:
    counts = {
        engine: {word: sum(row[engine]["verdict"] == word for row in rows) for word in WORDS} for engine in ENGINES
    }
    lines = [f"| of {len(rows)} | {' | '.join(WORDS)} |", "|---" * (1 + len(WORDS)) + "|"]
    lines += [f"| `{engine}` | {' | '.join(str(count[word]) for word in WORDS)} |" for engine, count in counts.items()]
    return "\n".join(lines)


WORDS = ("equal", "close", "refused", "failed", "wrong")


def write(rows: list[dict[str, Any]]) -> None:
    order = [(group, name) for group in GROUPS for name in GROUPS[group]]
    kept = sorted(
        (row for row in rows if (row["group"], row["name"]) in order),
        key=lambda row: order.index((row["group"], row["name"])),
    )
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": kept}, indent=1) + "\n")
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n\n{summary(kept)}\n{table(kept)}\n\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--rest", action="store_true", help="only rows that have no result yet")
    given = parser.parse_args()
    asked = [part.lower() for part in given.only.split(",") if part]
    known = (
        {(row["group"], row["name"]): row for row in json.loads(RESULTS.read_text())["rows"]}
        if RESULTS.exists()
        else {}
    )
    bad = 0
    try:
        for group, name in [(group, name) for group, rows in GROUPS.items() for name in rows]:
            if (asked and not any(part in name.lower() for part in asked)) or (given.rest and (group, name) in known):
                continue
            known[group, name] = row = run(group, name)
            print(f"{name}: " + ", ".join(f"{engine} {_cell(row[engine])}" for engine in ENGINES), flush=True)
            for engine in STRATEGIES:
                if row[engine]["verdict"] in ("wrong", "failed"):
                    bad += 1
                    print(f"   {engine}: {row[engine].get('line', '')}", flush=True)
            write(list(known.values()))
    finally:
        shut_down()
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
