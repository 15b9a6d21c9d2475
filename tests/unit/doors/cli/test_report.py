import json
from pathlib import Path

import pytest
from measure.report.sample_bench import sample_bench

from shardwise.doors.cli.app import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    sample_bench(name="a name").save(folder)
    return folder


def run(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, arguments)])
    return int(caught.value.code or 0), *capfd.readouterr()


def test_page_goes_into_the_folder_of_the_bench(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = folder / "report.html"
    assert run(capfd, folder) == (0, f"{page}\n", "")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>\n<html")


def test_page_and_trace_go_where_they_are_sent(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    code, out, _ = run(capfd, folder / "bench.json", "--out", page, "--trace", trace)
    assert (code, out) == (0, f"{page}\n{trace}\n")
    assert "a name" in page.read_text(encoding="utf-8")
    assert json.loads(trace.read_text())["otherData"]["name"] == "a name"


RESULTS = sorted((Path(__file__).parents[4] / "benchmarks" / "results").glob("bench_*.json"))


@pytest.mark.parametrize("results", RESULTS, ids=lambda path: path.stem)
def test_benches_that_were_kept_still_have_a_page(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(capfd, results, "--out", tmp_path / "page.html")[0] == 0
    assert "Same training." in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_text_that_utf8_cannot_say_does_not_stop_the_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = sample_bench(name="half").save(tmp_path)
    path.write_text(path.read_text().replace('"half"', '"\\ud800 half"'))
    assert run(capfd, tmp_path)[0] == 0
    assert "? half" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "InvalidBench: missing: there is no bench.json"),
        (["empty"], "InvalidBench: empty: there is no bench.json"),
        (["damaged"], "is not JSON"),
        (["wrong"], "wrong/bench.json: is damaged: case 99 of"),
        (["capacity"], "capacity/bench.json: is damaged: "),
        (["deep"], "deep/bench.json: is not JSON"),
        (
            ["good", "--out", "nowhere/report.html"],
            "InvalidData: --out nowhere/report.html: there is no folder nowhere",
        ),
        (["good", "--out", "empty"], "InvalidData: --out empty: is a folder; name a file in it"),
        (["good", "--trace", "nowhere/t.json"], "InvalidData: --trace nowhere/t.json: there is no folder nowhere"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged", "good", "wrong", "capacity", "deep"):
        Path(name).mkdir()
    Path("damaged/bench.json").write_text("{")
    good = json.loads((folder / "bench.json").read_text())
    Path("good/bench.json").write_text(json.dumps(good))
    Path("wrong/bench.json").write_text(json.dumps({**good, "recommended": 99}))
    Path("capacity/bench.json").write_text(json.dumps({**good, "capacity_bytes": "x"}))
    Path("deep/bench.json").write_text('{"a":' * 200_000)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
