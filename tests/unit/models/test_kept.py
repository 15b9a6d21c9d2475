"""A model that was traced before is not traced again, and never comes back as it was before a change."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from shardwise.models.reference import Model
from shardwise.models.specs import kept
from shardwise.models.specs.kept import spec_key
from shardwise.models.specs.spec_request import SpecRequest
from shardwise.plan import Plan
from shardwise.program.spec import ModelSpec

PLAN = Plan(precision="fp32", micro_batch=2)
LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
"num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
"max_position_embeddings": 32, "tie_word_embeddings": true}"""
_TRACED: dict[tuple[object, ...], ModelSpec] = {}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardwise" / "specs"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(model, number of ways) of each that was traced. Our own models, which do not change, are traced in earnest once."""
    found: list[tuple[str, int]] = []
    trace = Model._traced

    def noted(self: Model, request: SpecRequest, ways: Collection[tuple[str, str]]) -> ModelSpec:
        found.append((self.reference, len(ways)))
        if self.reference.startswith("hf:"):
            return trace(self, request, ways)
        asked = (request, frozenset(ways))
        if asked not in _TRACED:
            _TRACED[asked] = trace(self, request, ways)
        return _TRACED[asked]

    monkeypatch.setattr(Model, "_traced", noted)
    return found


def spec_of(reference: str = "gpt-tiny", *, seq: int | None = 16) -> ModelSpec:
    return Model(reference, seq=seq, kernels="cpu").spec_for(PLAN)


def test_a_model_is_traced_once(traced: list[tuple[str, int]]) -> None:
    first = spec_of()
    assert traced == [("gpt-tiny", 0), ("gpt-tiny", 1)]
    # Not by what the package ships, which is of other kernels.
    assert spec_of() == first
    assert len(traced) == 2
    assert spec_of(seq=8) != first
    assert len(traced) == 4


def test_a_hugging_face_model_comes_back_as_it_was_until_its_config_changes(
    traced: list[tuple[str, int]], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(LLAMA)
    first = spec_of(f"hf:{tmp_path}", seq=None)
    assert spec_of(f"hf:{tmp_path}", seq=None) == first
    assert len(traced) == 2
    config.write_text(LLAMA.replace('"num_hidden_layers": 6', '"num_hidden_layers": 7'))
    assert len(spec_of(f"hf:{tmp_path}", seq=None).units) == len(first.units) + 1
    assert len(traced) == 4


def test_a_spec_that_cannot_be_read_is_traced_and_written_again(traced: list[tuple[str, int]], folder: Path) -> None:
    first = spec_of()
    for broken in (b"", b"{", b"\xff", b"[]", b'{"format": 1}'):
        for path in folder.iterdir():
            path.write_bytes(broken)
        assert spec_of() == first
    assert len(traced) == 12
    assert spec_of() == first
    assert len(traced) == 12


def key(**changed: object) -> str | None:
    asked: dict[str, Any] = {"reference": "gpt-tiny", "seq": 8, "kernels": "cpu", "ways": [("fp32", "none")]} | changed
    ways = asked.pop("ways")
    return spec_key(SpecRequest(**asked), ways=ways)


def test_whatever_is_asked_otherwise_has_another_key() -> None:
    changes: list[dict[str, object]] = [
        {"reference": "llama-tiny"},
        {"seq": 9},
        {"image": 8},
        {"kernels": "cuda"},
        {"ways": [("bf16", "none")]},
        {"ways": []},
        {"units": "leaf"},
    ]
    assert len({key(), *(key(**change) for change in changes)}) == 8
    assert key() == key()


def test_an_edit_of_a_librarys_source_is_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "their_models" / "model.py"
    source.parent.mkdir()
    (source.parent / "__init__.py").write_text("")
    source.write_text("width = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kept, "_LIBRARIES", {"timm": ("their_models",)})
    monkeypatch.setattr(kept, "_BY_FILE", ("their_models",))
    before = key(reference="timm:x")
    assert key(reference="timm:x") == before
    status = source.stat()
    source.write_text("width = 2\n")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert key(reference="timm:x") != before


def test_what_ones_own_code_depends_on_is_not_known() -> None:
    assert key(reference="python:mine.py:task") is None


def test_nothing_is_kept_where_the_user_wants_nothing(
    traced: list[tuple[str, int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    spec_of()
    spec_of()
    assert len(traced) == 4
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert spec_of().traces


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_comes_with_the_package_is_not_traced_for_compiled_units(
    traced: list[tuple[str, int]], precision: str
) -> None:
    source = Model("gpt-tiny")
    spec = source.spec_for(Plan(precision=precision, compile="inductor"))
    assert source.spec_for(Plan(precision=precision, compile="inductor")) is spec
    assert spec.trace(computes_in=precision, recompute="none") is not None
    assert not traced
