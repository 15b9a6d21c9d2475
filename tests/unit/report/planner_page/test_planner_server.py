"""`shardwise plan --serve` and `--page`: what the server answers, what it refuses, and what is written."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from report.chromium import needs_chromium, page

from shardwise.cli import plan_page
from shardwise.cli.app import main
from shardwise.cli.plan_page import write_page
from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.interchange.targets import TARGETS
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan
from shardwise.report.planner_page import trace_apart
from shardwise.report.planner_page.planner_server import HOST, PlannerService, planner_server

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    start = {"model": "gpt-tiny", "device": "h100-80gb", "gpus": 8}
    service = PlannerService(start=start, own=None, targets=list(TARGETS), exports=plan_page._exports)
    with planner_server(service, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.server_address[0] == HOST == "127.0.0.1"
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_server_gives_the_page_and_models_of_the_catalogue(port: int) -> None:
    status, document = ask(port, "/")
    assert status == 200
    assert "connect-src &#x27;self&#x27;" in document
    assert '"name":"gpt-tiny"' in document
    status, text = ask(port, "/model?name=vit-digits")
    assert status == 200
    model = json.loads(text)
    assert (model["name"], model["seq"]) == ("vit-digits", None)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/model?name=../../etc/passwd", None, "is not a model of this page"),
        ("/trace", b"no", "the file is not JSON"),
        ("/trace", b'{"hidden_size": 8}', "it has no model_type"),
        ("/trace", b'{"model_type": "nothing-of-that-name"}', "nothing-of-that-name"),
        ("/export?to=torchrun&gpus=8", b"strategy = 3", "strategy = 3"),
        ("/trace", b"[" * 100_000, "the file is not JSON (nested too deeply"),
        ("/trace", b'{"model_type": "llama", "num_hidden_layers": Infinity}', "the file is not JSON"),
        ("/export?to=torchrun&gpus=8", b"a = " + b"[" * 100_000, "the plan is not TOML: nested too deeply"),
        ("/export?to=torchrun&gpus=x", b'strategy = "ddp"', "gpus = x: must be one of 1, 2, 3, 4"),
        ("/export?to=torchrun&gpus=-1", b'strategy = "ddp"', "gpus = -1: must be one of 1, 2, 3, 4"),
        ("/export?to=torchrun&gpus=" + "9" * 5000, b'strategy = "ddp"', f"gpus = {'9' * 20}: must be one of"),
        ("/export?to=torchrun", b'strategy = "ddp"', "gpus = : must be one of"),
    ],
)
def test_mistake_is_answered_in_one_line(port: int, path: str, body: bytes | None, said: str) -> None:
    status, text = ask(port, path, body)
    assert status == 400
    assert said in json.loads(text)["error"]


def test_pages_of_other_sites_are_refused(port: int) -> None:
    assert ask(port, "/", Host="evil.example")[0] == 403
    assert ask(port, "/trace", b"{}", Origin="http://evil.example")[0] == 403
    assert ask(port, "/nothing")[0] == 404
    assert ask(port, "/trace", b"{}", **{"Content-Length": str(2**30)})[0] == 400


@needs_chromium
def test_page_of_the_server_fetches_the_model_that_is_chosen(port: int) -> None:
    with page(f"http://{HOST}:{port}/") as opened:
        chosen = opened.evaluate("""(async () => {
          await plannerPage.settled;
          const models = document.getElementById("model");
          models.value = "vit-digits";
          models.dispatchEvent(new Event("change"));
          while (plannerPage.shown.planner.model.name !== "vit-digits") await new Promise((done) => setTimeout(done, 20));
          await plannerPage.settled;
          return [models.options.length, document.getElementById("title").textContent, document.getElementById("seq").disabled];
        })()""")
        assert chosen == [len(CATALOGUE), "vit-digits on 8 × NVIDIA H100 SXM5 80 GB", True]
        assert opened.errors == []
        assert {url.partition("?")[0] for url in opened.requests} <= {
            f"http://{HOST}:{port}/{path}" for path in ("model", "favicon.ico")
        }


def test_dropped_config_is_traced(port: int) -> None:
    pytest.importorskip("transformers")
    status, text = ask(port, "/trace", json.dumps(TINY).encode())
    assert status == 200, text
    model = json.loads(text)
    assert (model["name"], model["seq"], model["longest"]) == ("llama (config 1)", 128, None)
    assert model["num_units"] == 3
    assert set(model["ways"]) == {"none", "selective", "full"}


@pytest.mark.parametrize(
    ("layers", "said"), [('"x"', "this config.json cannot be made"), ("1e999", "its numbers must be finite")]
)
def test_values_that_make_no_model_are_answered_in_one_line(port: int, layers: str, said: str) -> None:
    pytest.importorskip("transformers")
    text = json.dumps(TINY).replace('"num_hidden_layers": 2', f'"num_hidden_layers": {layers}')
    status, answer = ask(port, "/trace", text.encode())
    assert status == 400
    line = json.loads(answer)["error"]
    assert said in line
    assert "\n" not in line


def test_a_huge_model_holds_up_no_other_request(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process is limited in time; two are made at once."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(trace_apart, "_MOST_SECONDS", 5.0)
    huge = json.dumps(TINY | {"num_hidden_layers": 10**8}).encode()
    with ThreadPoolExecutor(2) as threads:
        huge_ones = [threads.submit(ask, port, "/trace", huge) for _ in range(2)]
        time.sleep(1.0)
        assert ask(port, "/model?name=gpt-tiny")[0] == 200
        assert "2 models are being traced" in ask(port, "/trace", huge)[1]
        assert not any(one.done() for one in huge_ones)
    for one in huge_ones:
        status, text = one.result()
        assert (status, json.loads(text)["error"]) == (400, "tracing this model takes longer than 5 s")


def test_plan_of_the_page_is_exported(port: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    Plan(strategy="fsdp", precision="bf16", micro_batch=2).save(path)
    status, text = ask(port, "/export?to=torchrun&gpus=16", path.read_bytes())
    assert status == 200
    assert any("--nnodes" in one or "nnodes" in one for one in json.loads(text)["files"].values())


def test_page_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_page, "STATIC_MODELS", ("gpt-tiny",))
    path = tmp_path / "planner.html"
    write_page(path, model="vit-digits", cluster="2x8xh200")
    text = path.read_text()
    assert text.count('<script type="application/json" id="model-') == 2
    assert '"start":{"model":"vit-digits","device":"h200","gpus":16}' in text
    assert "connect-src" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_page_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "planner.html"
    with pytest.raises(InvalidPlan, match="models of the catalogue only"):
        write_page(path, model="params:60b", cluster=None)
    with pytest.raises(InvalidPlan, match="the page has no cpu"):
        write_page(path, model=None, cluster="4xcpu")
    with pytest.raises(InvalidPlan, match="nodes of 8"):
        write_page(path, model=None, cluster="3x4xh200")
    assert not path.exists()


def test_model_of_which_only_parameters_are_known_is_refused() -> None:
    with pytest.raises(InvalidModel, match="only its number of parameters is known"):
        plan_page.serve_page(model="params:60b", cluster=None, seq=None, image=None, port=0)


def test_plan_without_a_model_names_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan"])
    said = capsys.readouterr().err
    assert said.startswith("InvalidPlan: plan needs a model and a cluster")
    assert "shardwise plan --serve" in said
