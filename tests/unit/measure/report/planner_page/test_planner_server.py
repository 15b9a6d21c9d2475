"""The server of the planner page: what it serves, and what it refuses."""

import http.client
import json
import threading
from collections.abc import Iterator

import pytest

from shardwise.base.errors import InvalidPlan
from shardwise.measure.report.planner_page.planner_document import planner_page, saved_page
from shardwise.measure.report.planner_page.planner_server import HOST, Asked, Document, PlannerServer, Superseded


def broken(asked: Asked) -> dict[str, object]:
    raise ZeroDivisionError("a mistake of ours\nin two lines")


def refused(asked: Asked) -> dict[str, object]:
    raise InvalidPlan("no such plan\n  with a hint")


def old(asked: Asked) -> dict[str, object]:
    raise Superseded("too late")


@pytest.fixture(scope="module")
def server() -> Iterator[PlannerServer]:
    answers = {
        "": lambda asked: Document(text="<!doctype html>"),
        "echo": lambda asked: {"asked": asked},
        "file": lambda asked: Document(text="saved", file_name="answer.html"),
        "broken": broken,
        "refused": refused,
        "old": old,
    }
    with PlannerServer(answers, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: PlannerServer, path: str, *, token: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
    connection.request(method, f"/{server.token if token is None else token}/{path}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.headers), text


def said(server: PlannerServer, path: str, **headers: str) -> tuple[int, str]:
    status, _, text = ask(server, path, **headers)
    return status, json.loads(text)["error"]


def test_only_this_machine_reaches_the_server(server: PlannerServer) -> None:
    assert server.server_address[0] == HOST == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert len(server.token) >= 32


def test_page_and_answers_are_served_below_the_token(server: PlannerServer) -> None:
    status, headers, text = ask(server, "")
    assert (status, text) == (200, "<!doctype html>")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert json.loads(ask(server, "echo?a=1&b=")[2]) == {"asked": {"a": "1", "b": ""}}
    assert ask(server, "file")[1]["Content-Disposition"] == 'attachment; filename="answer.html"'


@pytest.mark.parametrize("token", ["", "x", "a" * 32, "%00"])
def test_another_token_is_refused(server: PlannerServer, token: str) -> None:
    for path in ("", "echo"):
        assert ask(server, path, token=token)[0] == 404
    assert ask(server, "nothing")[0] == 404


def test_other_hosts_and_origins_are_refused(server: PlannerServer) -> None:
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert said(server, "echo", Host=host) == (403, "this server answers its own page only")
    for origin in ("http://evil.example", "null", f"https://localhost:{port}", f"http://localhost:{port + 1}"):
        assert ask(server, "echo", Origin=origin)[0] == 403
    for name in ("127.0.0.1", "localhost"):
        assert ask(server, "echo", Host=f"{name}:{port}", Origin=f"http://{name}:{port}")[0] == 200


def test_only_get_is_answered(server: PlannerServer) -> None:
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, "echo", method=method)[0] == 501


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("a=" + "x" * 4000, "longer than 4,000 characters"),
        ("&".join(f"a{number}=" for number in range(50)), "cannot be read"),
        ("a", "cannot be read"),
        ("a=1&a=2", "a name twice"),
    ],
)
def test_queries_are_bounded_and_well_formed(server: PlannerServer, query: str, why: str) -> None:
    status, line = said(server, f"echo?{query}")
    assert status == 400
    assert why in line


def test_errors_are_one_line_and_ours_go_to_the_terminal(
    server: PlannerServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(server, "refused") == (400, "no such plan")
    assert said(server, "old") == (409, "too late")
    assert capfd.readouterr().err == ""
    assert said(server, "broken") == (500, "ZeroDivisionError: a mistake of ours")
    assert "Traceback" in capfd.readouterr().err


def test_port_that_is_taken_is_one_line(server: PlannerServer) -> None:
    with pytest.raises(InvalidPlan, match=f"--port {server.server_port}: cannot be used"):
        PlannerServer({}, port=server.server_port)


def test_only_the_page_with_controls_may_ask_its_server() -> None:
    page = planner_page({"models": []})
    assert "connect-src &#x27;self&#x27;" in page
    assert 'class="controls"' in page
    saved = saved_page({"plan": "</script>"})
    assert "connect-src" not in saved
    assert 'class="controls"' not in saved
    assert '{"saved":{"plan":"\\u003c/script>"}}' in saved
    assert "http://" not in saved.replace("http://www.w3.org/2000/svg", "")
