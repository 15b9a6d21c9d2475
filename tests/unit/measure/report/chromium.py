"""A page in headless Chromium, driven over its debugging pipe: what it shows, logs and asks the network for.

`--remote-debugging-pipe` speaks JSON with a zero byte after each message, on file descriptors 3 and 4. So nothing but
the standard library is needed, and no port. One Chromium serves all pages of a test run, since its start takes about a
second of CPU time; each page has a browser context of its own, so that nothing of an earlier one is left in it.
"""

import atexit
import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")

_LIMIT_SECONDS = 60.0
_HEIGHT = 900


class Chromium:
    """A process of Chromium, and the messages to and from it."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        asked, self._sink = _pipe()
        self._source, answered = _pipe()
        self._process = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *_options(self._profile.name)],
            {**os.environ, "HOME": self._profile.name},
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, asked, 3),
                (os.POSIX_SPAWN_DUP2, answered, 4),
            ],
            setsid=True,
        )
        os.close(asked)
        os.close(answered)
        self._unread = b""

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._sink, data) :]

    def read(self) -> dict[str, Any]:
        until = time.monotonic() + _LIMIT_SECONDS
        while b"\0" not in self._unread:
            if not select.select([self._source], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"chromium said nothing for {_LIMIT_SECONDS:.0f} s")
            data = os.read(self._source, 1 << 16)
            if not data:
                raise RuntimeError("chromium is gone")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def end(self) -> None:
        os.close(self._sink)
        os.close(self._source)
        # It is the leader of its own group: with it go the processes that it started.
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._profile.cleanup()


# By the process that started it: not that of a process which this one forks.
_running: dict[int, Chromium] = {}


def _end() -> None:
    running = _running.pop(os.getpid(), None)
    if running is not None:
        running.end()


atexit.register(_end)


class Page:
    """One open page. `errors`: of its scripts, its console and its content policy; `requests`: but for itself."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._number = 0
        self._session: str | None = None
        self._context = ""
        self._loaded = False
        self.url = ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, url: str, *, width: int, dark: bool) -> None:
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.look(width=width, dark=dark)
        self.url, self._loaded = url, False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._take(self._chromium.read())

    def close(self) -> None:
        self._session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def look(self, *, width: int, dark: bool = False) -> None:
        """Change the width of the screen, and the scheme that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=_HEIGHT, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression (of a promise: what it brings); what it throws is an error here."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(_thrown(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key as a keyboard sends it, to whatever has the focus; with what the browser itself does then."""
        named = {" ": ("Space", 32), "ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39)}
        code, number = named.get(key, ("", ord(key[0])))
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code, windowsVirtualKeyCode=number, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code, windowsVirtualKeyCode=number)

    def screenshot(self, path: str | Path, *, whole: bool = True) -> None:
        """What the page looks like, from top to bottom, or what the window shows of it."""
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["captureBeyondViewport"] = True
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Any method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._chromium.send(message)
        while True:
            answer = self._chromium.read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._take(answer)

    def _take(self, message: dict[str, Any]) -> None:
        """An event; those of a page before it, which come late, are not its own."""
        if message.get("sessionId") != self._session:
            return
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(_thrown(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(one.get("value", one)) for one in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent" if parameters["request"]["url"].partition("#")[0] != self.url:
                self.requests.append(parameters["request"]["url"])


@contextmanager
def page(path: str | Path, *, width: int = 1400, dark: bool = False) -> Iterator[Page]:
    """A file, or what a server on this machine gives, opened in a page that is closed with the block."""
    url = str(path) if str(path).startswith("http://") else Path(path).resolve().as_uri()
    if os.getpid() not in _running:
        _running[os.getpid()] = Chromium()
    try:
        opened = Page(_running[os.getpid()])
        opened.open(url, width=width, dark=dark)
        yield opened
        opened.close()
    except AssertionError:
        # Other pages may be open, such as that of a module.
        opened.close()
        raise
    except BaseException:
        # Whatever it is doing now, the next page finds a fresh one.
        _end()
        raise


def _options(profile: str) -> list[str]:
    options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
    options += ["--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage"]
    # Chromium has no sandbox for the superuser, who runs tests in containers.
    return [*options, "--no-sandbox"] if os.geteuid() == 0 else options


def _pipe() -> tuple[int, int]:
    """Both ends above 9, so that neither is in the way of 3 and 4; they close when a program starts."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


def _thrown(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]
