"""A wrong value anywhere in `bench.json` is one line, or does no harm: never an exception of Python's."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import whole

from reliability.said import say
from shardwise.measure.bench.results import InvalidBench, load_bench
from shardwise.measure.report.page.document import page_of
from shardwise.measure.report.perfetto import trace_of

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("bench_*.json"))
WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "a string": "wrong",
    "two lines": "a\nb",
    "empty": "",
    "negative": -1,
    "zero": 0,
    "a fraction": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus inf": float("-inf"),
    "huge": 10**400,
    "large": 1e300,
    "an empty list": [],
    "an empty object": {},
    "nested": [[{"a": []}]],
    "nan as text": "nan",
}
USUAL = ("null", "nan", "missing")
MISSING = object()
# Tables of which each entry is of the same kind.
ALIKE = [("param_norms",), ("buckets",), ("calls",), ("breakdown_bytes",)]

Path_ = tuple[str | int, ...]


def shorten(case: dict[str, Any]) -> None:
    """Leave out the middle of long tables: of the rows of a step, and of the operations in them."""
    num_rows = len(case["ledgers"][0]["entries"])
    kept = [*range(3), *range(num_rows - 3, num_rows)]
    for table in (case["predicted"], *case["ledgers"]):
        table["entries"] = [table["entries"][row] for row in kept]
    case["tape"] = [[*operation, kept.index(row)] for *operation, row in case["tape"] if row in kept]
    case["predicted"]["spans"] = [*case["predicted"]["spans"][:4], *case["predicted"]["spans"][-4:]]
    case["param_norms"] = dict(list(case["param_norms"].items())[:2])


def small(path: Path) -> dict[str, Any]:
    """A real bench with two of its cases: one with all that a case can have, and one that did not run.

    Fewer rows of the same kind, so that the page is made quickly.
    """
    data = json.loads(path.read_bytes())
    ran = [case for case in data["cases"] if case["step_seconds"]]
    chosen = [
        next(case for case in ran if case["tape"] and case["strategy"] == "fsdp"),
        *[case for case in data["cases"] if not case["step_seconds"]][:1],
    ]
    data["settings"] = {key: data["settings"][key] for key in ("task.model", "plan.precision", "plan.units")}
    data["settings"]["plan.mesh"] = {"replicate": 1, "shard": data["num_ranks"]}
    data["settings"]["plan.overrides"] = {"blocks.0": "ddp"}
    # One rank waits for nobody; with more, this is measured too.
    chosen[0]["silent_seconds"] = copy.deepcopy(chosen[0]["step_seconds"])
    shorten(chosen[0])
    # What benches write by now.
    chosen[0].update(tape_seconds=0.06, exposed_seconds=None, why_not_exposed="not measurable here")
    for ledger in chosen[0]["ledgers"]:
        ledger["operations"] = [[kind, dict(ledger["at_rest"])] for kind, *_ in chosen[0]["tape"]]
    return {**data, "cases": chosen, "recommended": 0, "scaling": data["scaling"][:2]}


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every value; of lists and long tables the first and the last, whose neighbours are alike."""
    yield path
    if isinstance(value, dict):
        keys = list(value)
        for key in dict.fromkeys((*keys[:1], *keys[-1:])) if path[-1:] in ALIKE else keys:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*path, index))


def changed(data: dict[str, Any], path: Path_, wrong: Any) -> Any:
    if not path:
        return None if wrong is MISSING else wrong
    whole = copy.copy(data)
    inner: Any = whole
    for step in path[:-1]:
        inner[step] = copy.copy(inner[step])
        inner = inner[step]
    if wrong is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = wrong
    return whole


def read(path: Path) -> str:
    """What reading and drawing it end in: nothing, or one line."""
    try:
        bench = load_bench(path)
    except InvalidBench as error:
        return str(error)
    page_of(bench).encode(errors="replace")
    json.dumps(trace_of(bench), allow_nan=False)
    return ""


@pytest.mark.ledger("bench-values", outcome="refused")
@pytest.mark.parametrize("wrong", [*USUAL, *whole(*(name for name in WRONG if name not in USUAL), "renamed")])
def test_a_wrong_value_anywhere_is_one_line_or_does_no_harm(tmp_path: Path, wrong: str) -> None:
    data = small(FILES[0])
    path = tmp_path / "bench.json"
    failures, refused, num_places = [], 0, 0
    for place in places(data):
        if wrong == "renamed" and not (place and isinstance(place[-1], str)):
            continue
        num_places += 1
        mutated = changed(data, place, WRONG.get(wrong, MISSING))
        if wrong == "renamed":
            mutated = changed(mutated, (*place[:-1], "an unknown name"), 1)
        path.write_text(json.dumps(mutated))
        try:
            line = read(path)
        except Exception as error:
            failures.append(f"{'.'.join(map(str, place))} = {wrong}: {error!r}")
            continue
        assert len(line.splitlines()) <= 1, line
        if line:
            say(line)
            refused += 1
    assert failures == []
    assert num_places > 100
    assert refused > num_places / 4, "most wrong values are found"


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        ({"case": "fsdp", "text": "step 2: loss 2 instead of 1", "excess": "inf"}, ""),
        ({"case": "fsdp", "text": 1, "excess": 1.0}, "equivalence.differences[0].text is 1, not a string"),
        ({"case": "fsdp"}, "equivalence.differences[0].text is missing"),
    ],
)
def test_differences_are_checked_too(tmp_path: Path, difference: dict[str, Any], says: str) -> None:
    data = small(FILES[0])
    data["equivalence"]["differences"] = [difference]
    (tmp_path / "bench.json").write_text(json.dumps(data))
    assert says in read(tmp_path)


def test_json_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("[" * 100_000)
    assert "is not JSON" in read(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_results_in_this_repository_are_read(path: Path) -> None:
    assert read(path) == ""
