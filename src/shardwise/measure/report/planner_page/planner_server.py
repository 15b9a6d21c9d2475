"""A small HTTP server for one page, which only this machine and only that page can reach.

It listens on the loopback address. Each address begins with a random token, which other programs of this machine do not
know; requests for another host, as a name that leads here would send them, and of other origins are refused.
"""

import hmac
import json
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from shardwise.base.errors import InvalidPlan, ShardwiseError

HOST = "127.0.0.1"
_MOST_SIGNS = 4000
_MOST_SETTINGS = 40
# A client that sends less than it has announced.
_REQUEST_SECONDS = 30.0


class Superseded(ShardwiseError):  # noqa: N818
    """A newer question has come, so that nobody waits for this answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """An HTML document; with a `file_name` the browser saves it."""

    text: str
    file_name: str = ""


Asked = dict[str, str]
Answers = Mapping[str, Callable[[Asked], Document | dict[str, Any]]]
"""Name after the token in the address → the answer to a query; the page itself has the name ""."""


class PlannerServer(ThreadingHTTPServer):
    """Serves `answers` on the loopback address; port 0 chooses a free one."""

    def __init__(self, answers: Answers, *, port: int) -> None:
        self.answers = answers
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InvalidPlan(f"--port {port}: cannot be used ({error.strerror})") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PlannerServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        status = HTTPStatus.OK
        answer: Document | dict[str, Any]
        try:
            answer = self._answer()
        except _Refused as error:
            status, answer = error.status, {"error": str(error)}
        except Superseded as error:
            status, answer = HTTPStatus.CONFLICT, {"error": str(error)}
        except ShardwiseError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error).partition("\n")[0][:_MOST_SIGNS]}
        except Exception as error:
            # A mistake of ours: the page gets one line, the terminal all of it.
            traceback.print_exc(file=sys.stderr)
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": line[:_MOST_SIGNS]}
        # The client may be gone.
        with suppress(ConnectionError):
            self._send(status, answer)

    def _answer(self) -> Document | dict[str, Any]:
        if len(self.path) > _MOST_SIGNS:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the address is longer than {_MOST_SIGNS:,} characters")
        if not self._is_from_here():
            raise _Refused(HTTPStatus.FORBIDDEN, "this server answers its own page only")
        address = urlsplit(self.path)
        token, slash, name = address.path.removeprefix("/").partition("/")
        is_ours = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not is_ours or not slash or name not in self.server.answers:
            raise _Refused(
                HTTPStatus.NOT_FOUND, "there is nothing at this address: open the one that the command has printed"
            )
        return self.server.answers[name](_asked(address.query))

    def _is_from_here(self) -> bool:
        """Return whether the request is from our own page: another site could reach this server under its own name."""
        names = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in names and origin in (None, *(f"http://{name}" for name in names))

    def _send(self, status: HTTPStatus, answer: Document | dict[str, Any]) -> None:
        data = (answer.text if isinstance(answer, Document) else json.dumps(answer, allow_nan=False)).encode()
        self.send_response(status)
        kind = "text/html" if isinstance(answer, Document) else "application/json"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if isinstance(answer, Document) and answer.file_name:
            self.send_header("Content-Disposition", f'attachment; filename="{answer.file_name}"')
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


# The address holds the token, so it goes to no other site, and no other site shows the page.
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _asked(query: str) -> Asked:
    """Return the names and values of a query, each name once."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=_MOST_SETTINGS)
    except ValueError as error:
        raise InvalidPlan(f"the settings in the address cannot be read ({error})") from error
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidPlan("the settings in the address have a name twice")
    return found
