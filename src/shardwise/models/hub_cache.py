"""`hf:NAME` → a folder with a config.json: a folder here, the Hugging Face hub's cache, or the hub itself.

hf:DIR, hf:DIR/config.json   a folder
hf:Qwen/Qwen3-8B             the newest snapshot in the cache; else, with a network, config.json alone is fetched
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from shardwise.base.errors import InvalidModel
from shardwise.base.files.data_file import UnreadableFile, read_text

_CONFIG = "config.json"
_ANSWER_SECONDS = 5.0
_YES = ("1", "on", "yes", "true")


def config_folder(name: str) -> str:
    """Return the folder whose config.json is meant; if there is none, the error says where it was looked for."""
    path = Path(name)
    folder = path.parent if path.name == _CONFIG else path
    if (folder / _CONFIG).is_file():
        return str(folder)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or path.is_dir():
        raise InvalidModel(f"hf:{name}: there is no {folder / _CONFIG}")
    snapshot = _newest_snapshot(name)
    if snapshot is not None:
        return str(snapshot)
    fetched, why_not = _fetched(name)
    if fetched is not None:
        return fetched
    raise InvalidModel(
        f"hf:{name}: there is no {folder / _CONFIG} here, no config.json of it in the hub's cache "
        f"({_repository(name)}), and it was not fetched ({why_not}): run `hf download {name} {_CONFIG}` where there is "
        "a network, or give a folder"
    )


def _cache() -> Path:
    """Return the hub's cache, by the variables that huggingface_hub reads."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    base = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(given or Path(base, "hub")).expanduser()


def _repository(name: str) -> Path:
    return _cache() / f"models--{name.replace('/', '--')}"


def _newest_snapshot(name: str) -> Path | None:
    """Return the snapshot of the main branch, or the newest one, that has a config.json."""
    repository = _repository(name)
    try:
        main = [repository / "snapshots" / read_text(repository / "refs" / "main").strip()]
    except UnreadableFile:
        main = []
    others = sorted(repository.glob("snapshots/*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((path for path in (*main, *others) if (path / _CONFIG).is_file()), None)


def _fetched(name: str) -> tuple[str | None, str]:
    """Fetch config.json alone; return its folder, or the reason why there is none."""
    if any(os.environ.get(switch, "").lower() in _YES for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return None, "offline by HF_HUB_OFFLINE"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        return None, "huggingface_hub is not installed: pip install 'shardwise[hf]'"
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        # Asked first, because the library repeats a request without a network for half a minute.
        with suppress(HTTPError):
            urlopen(Request(endpoint, method="HEAD"), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        return None, f"{endpoint} does not answer: {error}"
    try:
        return str(Path(hf_hub_download(name, _CONFIG)).parent), ""
    except (OSError, ValueError) as error:  # no network, no such model, a model that needs a login
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]
