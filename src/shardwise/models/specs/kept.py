"""A cache of traced specs in the user's cache folder.

The key covers everything a spec depends on: the request (reference, sizes, kernels, ways), the model's config, and the
source code that makes and traces the model. Source code counts by version and by the size and time of every file, so
that an edit in place changes the key. This is sound for models of this package and of installed libraries. A
`python:FILE.py` may depend on anything its code reads, and is traced each time.
"""

import json
import platform
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from shardwise.base.errors import InvalidData
from shardwise.base.files.cache_folder import cached_text, keep_text
from shardwise.base.files.data_file import UnreadableFile, read_text
from shardwise.models.catalogue import TRANSFORMERS_SHAPES, kind_of
from shardwise.models.hub_cache import config_folder
from shardwise.models.specs.spec_request import SpecRequest, Way
from shardwise.program.spec.model import ModelSpec
from shardwise.program.spec.store import decode_text, encode_text

_KIND = "specs"
# Kind of reference → the libraries of its models.
_LIBRARIES = {
    "hf": ("transformers", "tokenizers", "accelerate", "kernels", "numpy"),
    "timm": ("timm", "torchvision", "numpy"),
    "torchvision": ("torchvision", "numpy"),
}
# Packages of which every file counts; torch has tens of thousands, which are not edited in place.
_BY_FILE = ("shardwise", "transformers", "timm", "torchvision")


def spec_key(request: SpecRequest, *, ways: Collection[Way]) -> str | None:
    """Return the cache key of a spec; None if its dependencies are unknown."""
    kind, name = kind_of(request.reference)
    if request.is_given or kind not in ("", *_LIBRARIES):
        return None
    try:
        config = read_text(Path(config_folder(name), "config.json")) if kind == "hf" else ""
    except UnreadableFile:
        return None
    of_transformers = request.reference in TRANSFORMERS_SHAPES
    packages = ("shardwise", "torch", *_LIBRARIES.get("hf" if of_transformers else kind, ()))
    asked = [
        *(request.reference, request.seq, request.image, request.kernels, sorted(ways), config),
        *(repr(request.adaptation), sorted(request.tile), sorted(request.fp8), request.units),
    ]
    return json.dumps([asked, platform.python_version(), platform.machine(), *map(_fingerprint, packages)])


def kept_spec(key: str | None) -> ModelSpec | None:
    """Return the spec that was kept under `key`, if it exists and can be read."""
    text = cached_text(_KIND, key) if key is not None else None
    try:
        return decode_text(text, where=_KIND) if text is not None else None
    except InvalidData:
        return None


def keep_spec(key: str | None, spec: ModelSpec) -> None:
    if key is not None:
        keep_text(_KIND, key, encode_text(spec))


def _fingerprint(package: str) -> list[object]:
    """Return a package's version and, for _BY_FILE, path, size and time of its files, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found: list[object] = [package, version(package)]
    except PackageNotFoundError:
        found = [package, ""]
    place = find_spec(package) if package in _BY_FILE else None
    for folder in (place.submodule_search_locations or ()) if place is not None else ():
        for path in sorted(Path(folder).rglob("*.py")):
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    return found
