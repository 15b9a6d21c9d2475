"""`shardwise plan --serve`: the planner page from a small server that only this machine can reach."""

import json
import tempfile
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardwise.errors import InvalidModel, InvalidPlan, ShardwiseError
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan
from shardwise.report.planner_page.model_laws import model_data
from shardwise.report.planner_page.planner_document import catalogue_model, planner_page
from shardwise.sources import Source

HOST = "127.0.0.1"
_MOST_BYTES = 2**20
# Tokens per sample of a dropped config.json, unless its model has fewer positions.
_TRACED_SEQ = 2048
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

Exports = Callable[[Plan, int, str], dict[str, Any]]
"""(A plan, devices, a target) → its files and what was left out."""


class PlannerService:
    """What the server knows: models by name, each made once. One request is answered at a time: traces share torch."""

    def __init__(self, *, start: dict[str, Any], own: Source | None, targets: list[str], exports: Exports) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, dict[str, Any]] = {}
        self._exports = exports
        self._targets = targets
        self._own = own
        first = start["model"]
        self._page = planner_page([self.model(first)], start=start, server=self._offers())

    def _offers(self) -> dict[str, Any]:
        own = [self._own.reference] if self._own is not None else []
        return {"models": [*own, *(name for name in CATALOGUE if name not in own)], "targets": self._targets}

    def page(self) -> str:
        return self._page

    def model(self, name: str) -> dict[str, Any]:
        """A model of the catalogue, the one that the command named, or one that was traced here."""
        with self._lock:
            if name not in self._models:
                if name in CATALOGUE:
                    self._models[name] = catalogue_model(name)
                elif self._own is not None and name == self._own.reference:
                    self._models[name] = model_data(self._own.spec_for, name=name, longest=None)
                else:
                    raise InvalidModel(f"{name[:100]}: is not a model of this page")
            return self._models[name]

    def trace(self, config: bytes) -> dict[str, Any]:
        """The model of a Hugging Face config.json."""
        try:
            given = json.loads(config)
        except ValueError as error:
            raise InvalidModel("the file is not JSON") from error
        if not isinstance(given, dict) or "model_type" not in given:
            raise InvalidModel("the file is not a Hugging Face config.json: it has no model_type")
        with self._lock:
            kind = "".join(sign for sign in str(given["model_type"]) if sign.isalnum() or sign in "-_")[:40]
            number = sum(name.startswith(f"{kind} (") for name in self._models) + 1
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_bytes(config)
                name = f"{kind} (config {number})"
                source = Source(f"hf:{folder}", seq=_length(given))
                self._models[name] = model_data(source.spec_for, name=name, longest=None)
            return self._models[name]

    def export(self, plan: Plan, asked: dict[str, str]) -> dict[str, Any]:
        return self._exports(plan, int(asked.get("gpus", "0")), asked.get("to", ""))


class _Handler(BaseHTTPRequestHandler):
    service: PlannerService

    def do_GET(self) -> None:
        # Browsers ask for an icon by themselves.
        self._answer({"/": lambda _, __: self.service.page(), "/model": self._model, "/favicon.ico": lambda _, __: ""})

    def do_POST(self) -> None:
        self._answer({"/trace": lambda _, body: self.service.trace(body), "/export": self._export})

    def _model(self, asked: dict[str, str], _: bytes) -> dict[str, Any]:
        return self.service.model(asked.get("name", ""))

    def _export(self, asked: dict[str, str], body: bytes) -> dict[str, Any]:
        return self.service.export(_plan(body), asked)

    def _answer(self, routes: dict[str, Callable[[dict[str, str], bytes], Any]]) -> None:
        address = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            if not self._is_from_here():
                self._send(HTTPStatus.FORBIDDEN, {"error": "this server answers its own page only"})
            elif address.path not in routes:
                self._send(HTTPStatus.NOT_FOUND, {"error": f"{address.path[:100]}: there is no such thing here"})
            else:
                self._send(HTTPStatus.OK, routes[address.path](asked, self._body()))
        except (ShardwiseError, ValueError) as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def _is_from_here(self) -> bool:
        """Whether a page of ours asks: another site's may reach this server under a name of its own."""
        assert isinstance(self.server, ThreadingHTTPServer)
        names = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in names and (origin is None or origin.removeprefix("http://") in names)

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= _MOST_BYTES:
            raise InvalidModel(f"the file has {length:,} bytes; at most {_MOST_BYTES:,} are read")
        return self.rfile.read(length)

    def _send(self, status: HTTPStatus, answer: str | dict[str, Any]) -> None:
        is_page = isinstance(answer, str)
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: the terminal is the user's."""


def _length(config: dict[str, Any]) -> int:
    given = [int(config[key]) for key in _POSITIONS if isinstance(config.get(key), int)]
    return max(1, min([_TRACED_SEQ, *given]))


def _plan(body: bytes) -> Plan:
    import tomllib

    try:
        return Plan.from_dict(tomllib.loads(body.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidPlan("the plan is not TOML") from error


def planner_server(service: PlannerService, *, port: int) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0: a free one."""
    handler = type("PlannerHandler", (_Handler,), {"service": service})
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise InvalidPlan(f"--port {port}: cannot be used ({error.strerror})") from error
