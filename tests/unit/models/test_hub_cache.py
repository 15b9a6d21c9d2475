"""`hf:NAME` is a folder, a model in the hub's cache, or a line that says where it was looked for."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.error import URLError

import pytest

from shardwise.base.errors import InvalidModel
from shardwise.models.hub_cache import config_folder

NAME = "Qwen/Qwen3-8B"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub" / "models--Qwen--Qwen3-8B"


def snapshot(cache: Path, commit: str) -> Path:
    folder = cache / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_found_by_its_path_and_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert config_folder(str(tmp_path)) == config_folder(str(tmp_path / "config.json")) == str(tmp_path)


def test_the_snapshot_of_the_main_branch_is_found(cache: Path) -> None:
    newer = snapshot(cache, "bbb")
    main = snapshot(cache, "aaa")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    assert config_folder(NAME) == str(main)
    (main / "config.json").unlink()
    assert config_folder(NAME) == str(newer)


def test_offline_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidModel) as caught:
        config_folder(NAME)
    line = str(caught.value)
    assert all(text in line for text in (f"{NAME}/config.json", str(cache), "HF_HUB_OFFLINE", f"hf download {NAME}"))
    assert "\n" not in line


def test_without_a_network_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")

    def no_network(*_: object, **__: object) -> None:
        raise URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(InvalidModel, match="https://huggingface.co does not answer: .*no route"):
        config_folder(NAME)


@pytest.mark.parametrize("name", ["nowhere", "/nowhere", "a/b/c", "../x"])
def test_what_cannot_be_a_name_on_the_hub_is_only_a_folder(name: str) -> None:
    with pytest.raises(InvalidModel, match=f"there is no {name}/config.json"):
        config_folder(name)


class Hub(BaseHTTPRequestHandler):
    """A hub with one model: its config.json is the only file that exists."""

    asked: ClassVar[list[str]] = []
    text = b'{"model_type": "qwen3"}'

    def do_HEAD(self) -> None:
        self._answer(with_text=False)

    def do_GET(self) -> None:
        self._answer(with_text=True)

    def _answer(self, *, with_text: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        is_config = path == f"/{NAME}/resolve/main/config.json"
        self.send_response(200 if is_config or path == "/" else 404)
        for name, value in (("ETag", '"e1"'), ("X-Repo-Commit", "c" * 40), ("Content-Length", str(len(self.text)))):
            self.send_header(name, value)
        self.end_headers()
        if with_text:
            self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        pass


def test_with_a_network_the_config_alone_is_fetched(cache: Path) -> None:
    """In a process of its own, since the library reads its variables when it is imported."""
    pytest.importorskip("huggingface_hub")
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        serving = threading.Thread(target=hub.serve_forever, daemon=True)
        serving.start()
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "NO_PROXY": "127.0.0.1"}
        code = f"from shardwise.models.hub_cache import config_folder; print(config_folder({NAME!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        hub.shutdown()
        serving.join()
    assert done.returncode == 0, done.stderr[-2000:]
    folder = Path(done.stdout.strip().splitlines()[-1])
    assert folder == cache / "snapshots" / ("c" * 40)
    assert (folder / "config.json").read_bytes() == Hub.text
    assert {path for path in Hub.asked if NAME in path} == {f"/{NAME}/resolve/main/config.json"}
    assert config_folder(NAME) == str(folder), "then it is in the cache"
