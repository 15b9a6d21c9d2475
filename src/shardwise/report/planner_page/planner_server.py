"""`shardwise plan --serve`: the planner page from a small server that only this machine can reach."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardwise.errors import InvalidModel, InvalidPlan, ShardwiseError
from shardwise.files.data_file import UnreadableFile, parse_json, parse_toml
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan
from shardwise.report.planner_page.model_laws import model_data
from shardwise.report.planner_page.page_plans import DEVICE_COUNTS
from shardwise.report.planner_page.planner_document import catalogue_model, planner_page
from shardwise.report.planner_page.trace_apart import trace_apart
from shardwise.sources import Source

HOST = "127.0.0.1"
_MOST_BYTES = 2**20
_MOST_TRACES = 2
_MOST_SIGNS = 1000
# A client that sends less than it has announced.
_REQUEST_SECONDS = 30.0
# Tokens per sample of a dropped config.json, unless its model has fewer positions.
_TRACED_SEQ = 2048
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

Exports = Callable[[Plan, int, str], dict[str, Any]]
"""(plan, number of devices, target) → files, and the settings that were left out."""


class PlannerService:
    """The data that the server offers: the page, and models by name, each made once.

    The command's own models are made one at a time, because traces share torch's global state; those of config files
    in processes of their own, at most _MOST_TRACES at once.
    """

    def __init__(self, *, start: dict[str, Any], own: Source | None, targets: list[str], exports: Exports) -> None:
        self._lock = threading.Lock()
        self._traces = threading.Semaphore(_MOST_TRACES)
        self._models: dict[str, dict[str, Any]] = {}
        self._exports = exports
        self._own = own
        names = [own.reference] if own is not None else []
        offers = {"models": [*names, *(name for name in CATALOGUE if name not in names)], "targets": targets}
        self.page = planner_page([self.model(start["model"])], start=start, server=offers)

    def model(self, name: str) -> dict[str, Any]:
        """Return the data of a catalogue model, of the model that the command named, or of one that was traced here."""
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
        """Trace the model of a Hugging Face config.json, and return its data."""
        try:
            given = parse_json(config)
        except UnreadableFile as error:
            raise InvalidModel(f"the file {error}") from error
        if not isinstance(given, dict) or "model_type" not in given:
            raise InvalidModel("the file is not a Hugging Face config.json: it has no model_type")
        lengths = [given[key] for key in _POSITIONS if isinstance(given.get(key), int)]
        if not self._traces.acquire(blocking=False):
            raise InvalidModel(f"{_MOST_TRACES} models are being traced: try again when they are done")
        try:
            data = trace_apart(config, seq=max(1, min([_TRACED_SEQ, *lengths])))
        finally:
            self._traces.release()
        kind = "".join(sign for sign in str(given["model_type"]) if sign.isalnum() or sign in "-_")[:40]
        with self._lock:
            number = sum(name.startswith(f"{kind} (") for name in self._models) + 1
            name = f"{kind} (config {number})"
            self._models[name] = data | {"name": name}
            return self._models[name]

    def export(self, plan: bytes, asked: dict[str, str]) -> dict[str, Any]:
        """Return the files of a plan, given as TOML, for the target in `asked`."""
        try:
            table = parse_toml(plan.decode())
        except UnicodeDecodeError as error:
            raise InvalidPlan(f"the plan is not text in UTF-8 (byte {error.start})") from error
        except UnreadableFile as error:
            raise InvalidPlan(f"the plan {error}") from error
        counts = {str(count): count for count in DEVICE_COUNTS}
        if (gpus := asked.get("gpus", "")) not in counts:
            raise InvalidPlan(f"gpus = {gpus[:20]}: must be one of {', '.join(counts)}")
        return self._exports(Plan.from_dict(table), counts[gpus], asked.get("to", ""))


_Routes = dict[str, Callable[[dict[str, str], bytes], Any]]
"""Path → what answers a request, given its query and its body."""


class _Handler(BaseHTTPRequestHandler):
    service: PlannerService
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        # Browsers always request an icon.
        routes: _Routes = {"/": lambda _, __: self.service.page, "/favicon.ico": lambda _, __: ""}
        self._answer(routes | {"/model": lambda asked, _: self.service.model(asked.get("name", ""))})

    def do_POST(self) -> None:
        routes: _Routes = {"/trace": lambda _, body: self.service.trace(body)}
        self._answer(routes | {"/export": lambda asked, body: self.service.export(body, asked)})

    def _answer(self, routes: _Routes) -> None:
        try:
            status, answer = self._answered(routes)
        except Exception as error:
            # Whatever a request makes of the server, it gets one line.
            line = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
            status, answer = HTTPStatus.BAD_REQUEST, {"error": line[:_MOST_SIGNS]}
        # The client may be gone.
        with suppress(ConnectionError):
            self._send(status, answer)

    def _answered(self, routes: _Routes) -> tuple[HTTPStatus, Any]:
        address = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if not self._is_from_here():
            return HTTPStatus.FORBIDDEN, {"error": "this server answers its own page only"}
        if address.path not in routes:
            return HTTPStatus.NOT_FOUND, {"error": f"{address.path[:100]}: there is no such thing here"}
        return HTTPStatus.OK, routes[address.path](asked, self._body())

    def _is_from_here(self) -> bool:
        """Return whether the request is from our own page: another site could reach this server under its own name."""
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
        """Log nothing."""


def planner_server(service: PlannerService, *, port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback address; port 0 chooses a free one."""
    handler = type("PlannerHandler", (_Handler,), {"service": service})
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise InvalidPlan(f"--port {port}: cannot be used ({error.strerror})") from error
