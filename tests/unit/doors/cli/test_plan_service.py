"""The answers of `shardwise plan --serve`: those of the command, for every setting that the page may ask for."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ShardwiseError
from shardwise.doors.cli import plan_page
from shardwise.doors.cli.app import main
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_service import PlanService
from shardwise.measure.report.planner_page.planner_server import Superseded
from shardwise.plan import Plan

MODEL = "gpt2-124m"


@pytest.fixture(scope="module")
def service() -> PlanService:
    return PlanService(PlanOptions(model=MODEL, cluster="8xh100-80gb"))


def printed(capfd: pytest.CaptureFixture[str], command: str, *more: str) -> str:
    with pytest.raises(SystemExit):
        main([*command.split()[1:], *more])
    return capfd.readouterr().out


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"cluster": "2xl40s", "recompute": "full", "micro_batch": "4", "seq": "512"},
        {"cluster": "2x8xa100-40gb", "budget": "20GiB", "precision": "fp32", "accumulate": "2"},
        {"cluster": "1xh100-80gb", "offload": "states", "update": "backward", "recompute": "full"},
        {"tokens": "2B", "price": "2.5", "strategy": "fsdp", "optimizer": "sgd"},
        {"model": "resnet18", "cluster": "4xh200"},
        {"cluster": "1xh100-80gb", "micro_batch": "64", "budget": "10GiB"},
    ],
)
def test_answer_is_that_of_plan_json(
    service: PlanService, capfd: pytest.CaptureFixture[str], setting: dict[str, str]
) -> None:
    answer = json.loads(json.dumps(service.answer(dict(setting))))
    command = json.loads(printed(capfd, answer["command"], "--json"))
    # The page has no adapters.
    ways, printed_ways = answer["plan"].pop("ways"), command.pop("ways")
    assert [way for way in ways if way in printed_ways] == [
        way for way in printed_ways if "--lora" not in way["command"]
    ]
    assert answer["plan"] == command
    assert not answer["is_quick"]


def test_files_are_those_of_save(service: PlanService, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = service.answer({"cluster": "8xv100-16gb", "recompute": "full", "budget": "12GiB"})
    printed(capfd, answer["command"], "--save", str(tmp_path / "plan.toml"))
    saved = (tmp_path / "plan.toml").read_text()
    assert answer["files"][answer["plan"]["recommended"]] == saved
    assert answer["command"] == f"shardwise plan {MODEL} --cluster 8xv100-16gb --recompute full --budget 12GiB"


def test_quick_answer_leaves_out_the_allocators_model_alone(service: PlanService) -> None:
    asked = {"cluster": "8xh100-80gb", "micro_batch": "8"}
    quick, refined = (service.answer({**asked, "refined": refined})["plan"]["candidates"] for refined in "01")
    for one, other in zip(quick, refined, strict=True):
        assert one["peak_bytes"]["reserved"] == one["peak_bytes"]["allocated"] <= other["peak_bytes"]["reserved"]
        assert one["step_seconds"] == other["step_seconds"]
        same = ("params", "grads", "optim", "gathered", "reduce", "activations")
        assert [one["breakdown_bytes"][name] for name in same] == [other["breakdown_bytes"][name] for name in same]


def test_a_row_per_strategy_and_the_chosen_ones_step(service: PlanService) -> None:
    answer = service.answer({"cluster": "4x8xh100-80gb", "chosen": "zero1"})
    candidates = answer["plan"]["candidates"]
    assert len(answer["rows"]) == 5 < len(candidates)
    assert answer["plan"]["recommended"] in answer["rows"]
    assert candidates[answer["chosen"]]["strategy"] == "zero1"
    assert {span["queue"] for span in answer["timeline"]} == {"compute", "gather", "reduce"}
    assert service.answer({"chosen": "nothing"})["chosen"] == service.answer({})["plan"]["recommended"]


def test_ways_out_are_settings_that_fit(service: PlanService) -> None:
    answer = service.answer({"cluster": "1xh100-80gb", "micro_batch": "32", "budget": "10GiB"})
    assert answer["plan"]["recommended"] is None
    assert answer["ways"][0]["text"] == "16 samples per pass, in 2 passes"
    setting = {"cluster": "1xh100-80gb", "micro_batch": "32", "budget": "10GiB", **answer["ways"][0]["setting"]}
    assert service.answer(setting)["plan"]["recommended"] is not None
    asked = {"cluster": "1xh100-80gb", "micro_batch": "1", "recompute": "full", "budget": "3GiB"}
    larger, hosted, *_ = service.answer(dict(asked))["ways"]
    assert larger["text"] == "4 devices"
    assert larger["setting"]["cluster"] == "4xh100-80gb"
    assert hosted["text"].startswith("host memory, ")
    assert hosted["setting"]["host_memory"] == "116GiB", "the listed machine of an H100"
    assert service.answer({**asked, **hosted["setting"]})["plan"]["recommended"] is not None


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"nothing": "1"}, "nothing"),
        ({"devices": "/etc/passwd"}, "devices"),
        ({"model": "../../etc/passwd"}, "model = '../../etc/passwd'"),
        ({"model": "python:x.py:y"}, "is not a model of this page"),
        ({"model": "hf:/nowhere/at/all"}, "/nowhere/at/all"),
        ({"model": "hf:a\nb"}, "model = 'hf:a\\nb'"),
        ({"cluster": "own.toml"}, "expected"),
        ({"cluster": "8xcpu"}, "the page has no cpu"),
        ({"cluster": "9999x999xh200"}, "at most 65,536 devices"),
        ({"cluster": ""}, "cluster = ''"),
        ({"micro_batch": "-1"}, "micro_batch = '-1'"),
        ({"micro_batch": "9" * 5000}, "micro_batch = '999"),
        ({"seq": "100000"}, "--seq 100000: gpt2-124m has no laws"),
        ({"precision": "int3"}, "int3"),
        ({"budget": "much"}, "much"),
        ({"price": "2"}, "--price needs --tokens"),
        ({"tokens": "many"}, "--tokens many"),
        ({"refined": "2"}, "must be 0 or 1"),
        ({"strategy": "a\nb"}, "strategy = 'a\\nb'"),
    ],
)
def test_malformed_values_are_one_clear_line(service: PlanService, setting: dict[str, str], why: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        service.answer(setting)
    assert why in str(caught.value).partition("\n")[0]


def test_newer_question_of_a_page_ends_the_older_one(service: PlanService, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[type[BaseException] | None] = []

    def ask(setting: dict[str, str]) -> None:
        try:
            service.answer(setting)
            found.append(None)
        except Superseded as error:
            found.append(type(error))

    with service._lock:
        older = threading.Thread(target=ask, args=({"page": "a", "budget": "31GiB"},))
        older.start()
        while "a" not in service._newest:
            pass
        other = threading.Thread(target=ask, args=({"page": "b", "budget": "32GiB", "refined": "0"},))
        other.start()
        first = service._newest["a"]
        newer = threading.Thread(target=ask, args=({"page": "a", "budget": "33GiB", "refined": "0"},))
        newer.start()
        while service._newest["a"] is first:
            pass
    for thread in (older, other, newer):
        thread.join()
    assert sorted(map(str, found)) == [
        "<class 'shardwise.measure.report.planner_page.planner_server.Superseded'>",
        "None",
        "None",
    ]


def test_lengths_that_laws_cover_need_no_other_trace(service: PlanService, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.models.reference import Model

    def traced(self: Model, ways: Any) -> None:
        raise AssertionError("a model was traced")

    monkeypatch.setattr(Model, "_traced", traced)
    for setting in ({"seq": "768"}, {"recompute": "selective"}, {"seq": "384", "recompute": "full"}):
        assert service.answer({**setting, "refined": "0"})["plan"]["candidates"]


def test_frontier_has_the_fastest_plan_of_each_budget(service: PlanService) -> None:
    points = service.frontier({"cluster": "1xh100-80gb"})["frontier"]
    assert len(points) == 8
    speeds = [point["fixed"]["samples_per_s"] for point in points if point["fixed"]]
    assert speeds == sorted(speeds)


def test_plan_is_exported_for_other_tools(service: PlanService) -> None:
    found = service.export({"cluster": "2x8xh200", "to": "torchrun", "chosen": "fsdp"})
    assert any("nnodes" in text for text in found["files"].values())
    with pytest.raises(ShardwiseError, match="nowhere"):
        service.export({"to": "nowhere"})


def test_saved_file_holds_the_answer_that_is_shown(service: PlanService) -> None:
    setting = {"cluster": "4xh200", "chosen": "zero2"}
    document = service.saved(dict(setting))
    assert document.file_name == "shardwise-plan.html"
    text = document.text.partition('id="planner-data">')[2].partition("</script>")[0]
    saved = json.loads(text)["saved"]
    assert len(saved.pop("frontier")) == 8
    assert saved == json.loads(json.dumps(service.answer(dict(setting))))


def test_options_of_the_command_are_where_the_page_starts() -> None:
    options = PlanOptions(model="gpt-tiny", cluster="2x8xh200", recompute="full", accumulate=4, quantize=None)
    own = PlanService(options)
    page = own.answers[""]({})
    start = '"start":{"model":"gpt-tiny","cluster":"2x8xh200","recompute":"full","accumulate":"4"}'
    assert start in page.text  # type: ignore[union-attr]
    answer = own.answer({"refined": "0"})
    assert {one["accumulate"] for one in answer["plan"]["candidates"]} == {4}
    assert own.answer({"refined": "0", "recompute": ""})["command"].endswith("--cluster 2x8xh200 --accumulate 4")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--cluster", "4xcpu"), "the page has no cpu"),
        (("params:60b",), "only its number of parameters is known"),
        (("--here",), "--devices and --here are without it"),
        (("--cluster", "own.toml"), "--devices and --here are without it"),
        (("--json",), "--json and --save are without it"),
    ],
)
def test_serve_refuses_what_no_page_can_show(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *arguments, "--serve", "--no-browser", "--port", "0"])
    assert why in capfd.readouterr().err


def test_browser_in_the_terminal_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Windowed:
        def open_new_tab(self, address: str) -> None:
            opened.append(address)

    monkeypatch.setattr(plan_page.webbrowser, "get", Windowed)
    plan_page._open("http://here/")
    monkeypatch.setattr(plan_page.webbrowser, "get", lambda: plan_page.webbrowser.GenericBrowser("lynx"))
    plan_page._open("http://there/")
    assert opened == ["http://here/"]


def test_ctrl_c_ends_the_server() -> None:
    command = [sys.executable, "-m", "shardwise", "plan", "gpt-tiny", "--serve", "--no-browser", "--port", "0"]
    # A shell starts what runs in the background without SIGINT.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.stderr.read()
        assert line.endswith("/ (Ctrl+C to stop)\n")
        os.kill(process.pid, signal.SIGINT)
        try:
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_command_names_every_option_that_is_not_a_default() -> None:
    options = PlanOptions(
        model="hf:my model", cluster="8xh200", accumulate_reduced=True, tile=("*.mlp=64", "head=32"), price=2.5
    )
    assert options.command == (
        "shardwise plan 'hf:my model' --cluster 8xh200 --accumulate-reduced --tile '*.mlp=64' --tile head=32 --price 2.5"
    )


def test_saved_plan_of_the_page_is_a_plan(service: PlanService, tmp_path: Path) -> None:
    answer = service.answer({"cluster": "2xh200"})
    path = tmp_path / "plan.toml"
    path.write_text(answer["files"][answer["chosen"]])
    assert Plan.load(path).strategy == answer["plan"]["candidates"][answer["chosen"]]["strategy"]


def test_plan_without_a_model_names_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan"])
    said = capsys.readouterr().err
    assert said.startswith("InvalidPlan: plan needs a model and a cluster")
    assert "shardwise plan --serve" in said
