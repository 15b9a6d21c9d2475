"""A training under several engines on two CPU ranks, compared with one process: for scenarios.py and compatibility.py.

equal     all weights at the end are the same bit for bit
close     within 1e-5 of each tensor's largest value, or of a thousandth of the model's largest where that is more:
          a bias whose gradient is truly zero holds only rounding
wrong     further apart
refused   an error of Shardwise says why, before anything was trained
failed    another error, or ranks that did not come back

With --graphs, our strategies replay units as CUDA graphs, simulated on the CPU: every form is recorded at once, and
each replay spoils graph memory that is free (tests/dist/simulated_graphs.py). Trainings are a few steps longer then,
because the first steps are ordinary ones.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from rows import ROOT, Outcome, Report, Row, arguments, chosen, run, table

# The small models and optimizers of the tests, and the pool that runs ranks. Ranks import this file too.
sys.path[:0] = [str(ROOT / "tests" / "dist"), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from ranks import RankFailed, run_ranks, shut_down  # noqa: E402
from scenario_rows import architectures, optimizers, trainings, unusual  # noqa: E402
from scenario_rows.runners import NUM_RANKS, PEERS, Runner, Weights, make_runner  # noqa: E402
from simulated_graphs import simulated  # noqa: E402

GROUPS = {
    "Optimizers": optimizers.ROWS,
    "Trainings": trainings.ROWS,
    "Unusual trainings": unusual.ROWS,
    "Architectures": architectures.ROWS,
}
VERDICTS = ("equal", "close", "refused", "failed", "wrong")
_CLOSE, _LEAST = 1e-5, 1e-3
_GRAPHS = ", graphs"
_MORE_STEPS = 3


def as_graphs(engine: str) -> str:
    """Return the name of an engine whose units are simulated graphs."""
    return f"{engine}{_GRAPHS}"


def train(rank: int, group: str, name: str, engine: str) -> dict[str, Any]:
    """Run a row on a rank; return the weights at the end, or the error that it ended with."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with_graphs = engine.endswith(_GRAPHS)
    try:
        runner = make_runner(engine.removesuffix(_GRAPHS), rank)
        runner.more_steps = _MORE_STEPS if with_graphs else 0
        with simulated(at_once=True) if with_graphs else nullcontext():
            weights = GROUPS[group][name](runner)
    except Exception as error:
        if engine.startswith(Runner.name):
            raise
        refused = type(error).__module__.split(".")[0] == "shardwise"
        said = str(error) if refused else f"{type(error).__name__}: {error}"
        return {"verdict": "refused" if refused else "failed", "line": _short(said)}
    # Ranks of a training that failed are not used again: see the pool.
    torch.use_deterministic_algorithms(False)
    return {"weights": weights, "owned": runner.owned, "replayed": runner.num_replayed}


def compare(group: str, name: str, *, engines: Sequence[str], limit_seconds: float) -> Outcome:
    """Engine → its verdict. All engines with graphs, or none."""
    one_process = as_graphs(Runner.name) if engines[0].endswith(_GRAPHS) else Runner.name
    (alone,) = run_ranks(train, num_ranks=1, args=(group, name, one_process), timeout_seconds=limit_seconds)
    outcome: Outcome = {}
    for engine in engines:
        args = (group, name, engine)
        try:
            found = run_ranks(train, num_ranks=NUM_RANKS, args=args, timeout_seconds=limit_seconds)
        except RankFailed as error:
            outcome[engine] = {"verdict": "failed", "line": _short(str(error).splitlines()[0])}
        else:
            outcome[engine] = verdict(found, alone["weights"])
    return outcome


def verdict(ranks: Sequence[Mapping[str, Any]], expected: Weights) -> Outcome:
    """Return the verdict on what the ranks returned, with the distance or the line."""
    ended = sorted((dict(rank) for rank in ranks if "line" in rank), key=lambda rank: rank["verdict"])
    if ended:
        return ended[0]
    far = max(distance(rank["weights"], expected) for rank in ranks)
    word = "equal" if far == 0 else "close" if far <= _CLOSE else "wrong"
    replayed = min(rank.get("replayed", 0) for rank in ranks)
    more = {"owned": ranks[0]["owned"], "replayed": replayed}
    return {"verdict": word, "distance": far} | {key: value for key, value in more.items() if value}


def distance(found: Weights, expected: Weights) -> float:
    """Return the largest difference, as a share of the tensor's largest value; 0 only where all bits are equal."""
    if found.keys() != expected.keys():
        return float("inf")
    if all(torch.equal(found[name], value) for name, value in expected.items()):
        return 0.0
    sizes = {name: value.abs().max().item() for name, value in expected.items() if value.numel()}
    least = _LEAST * max((sizes[name] for name in sizes if not _counts(expected[name])), default=0.0)
    far = [_difference(found[name], expected[name]) / max(size, least, 1e-30) for name, size in sizes.items()]
    return max((one if one == one else float("inf") for one in far), default=0.0)


def _counts(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if _counts(expected):
        return 0.0 if torch.equal(found, expected) else float("inf")
    return (found.to(expected.dtype) - expected).abs().max().item()


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:299] + "…"


def rows_of(group: str, *, engines: Sequence[str], limit_seconds: float) -> list[Row]:
    compared = partial(compare, group, engines=engines, limit_seconds=limit_seconds)
    return [Row(name=name, run=partial(compared, name), needs=_needs(name)) for name in GROUPS[group]]


def main(
    description: str | None,
    *,
    report: Report,
    groups: Sequence[str],
    engines: Sequence[str],
    graphs: Sequence[str] = (),
) -> int:
    """Run the rows of these groups that were asked for; return the exit code. `graphs`: the engines of --graphs."""
    parser = arguments(description, limit_seconds=120.0)
    if graphs:
        parser.add_argument("--graphs", action="store_true", help="our strategies again, with units as graphs")
    asked = parser.parse_args()
    engines = graphs if graphs and asked.graphs else engines
    rows = [row for group in groups for row in rows_of(group, engines=engines, limit_seconds=asked.limit)]
    known = [name for name, row in report.read()["rows"].items() if asked.rest and engines[0] in row]

    def beside_others(row: Row) -> Outcome:
        """Run a row, and keep what engines that were not asked for have made of it."""
        return {**report.read()["rows"].get(row.name, {}), **row.run()}

    try:
        return run(chosen(rows, only=asked.only, known=known), report=report, held=held, line=line, each=beside_others)
    finally:
        shut_down()


def _needs(name: str) -> tuple[str, ...]:
    packages = {"hf:": "transformers", "timm:": "timm", optimizers.BITSANDBYTES: optimizers.BITSANDBYTES}
    return tuple(package for start, package in packages.items() if name.startswith(start))


def held(outcome: Outcome) -> bool:
    """Whether no training of ours is wrong or failed."""
    return all(found["verdict"] in VERDICTS[:3] for engine, found in outcome.items() if engine not in PEERS)


def line(outcome: Outcome) -> str:
    return ", ".join(f"{engine} {cell(found)}" for engine, found in outcome.items()) + "".join(
        f"\n   {engine}: {found['line']}"
        for engine, found in outcome.items()
        if "line" in found and engine not in PEERS
    )


# Pages


def cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    word = str(found["verdict"])
    shown = f"{word} ({found['distance']:.0e})" if word in ("close", "wrong") and "distance" in found else word
    return f"{shown}, OWNED" if found.get("owned") else shown


def counts(outcomes: Iterable[Outcome], *, engines: Sequence[str]) -> str:
    """A table: how often each engine got each verdict."""
    outcomes = list(outcomes)
    words = {engine: Counter(row[engine]["verdict"] for row in outcomes if engine in row) for engine in engines}
    lines = [[f"`{engine}`", *(str(words[engine][word]) for word in VERDICTS)] for engine in engines]
    return table([f"of {len(outcomes)}", *VERDICTS], lines)


def verdicts(head: Sequence[str], outcomes: Mapping[Sequence[str], Outcome], *, engines: Sequence[str]) -> str:
    """A table: every row with the verdict of each engine. `outcomes`: first cells of a row → its outcome."""
    lines = [[*first, *(cell(outcome.get(engine)) for engine in engines)] for first, outcome in outcomes.items()]
    return table([*head, *(f"`{engine}`" for engine in engines)], lines)


def lines_said(outcomes: Mapping[str, Outcome], *, engines: Sequence[str]) -> str:
    """A list: each error's line once, with the rows and engines that ended with it."""
    said: dict[str, dict[str, list[str]]] = {}
    for name, outcome in outcomes.items():
        for engine in engines:
            if text := outcome.get(engine, {}).get("line"):
                said.setdefault(text, {}).setdefault(name, []).append(f"`{engine}`")
    lines = []
    for text, where in said.items():
        names = "; ".join(f"{name} under {', '.join(under)}" for name, under in where.items())
        lines.append(f"- {names}: `{text.replace('`', chr(39))}`")
    return "\n".join(lines)
