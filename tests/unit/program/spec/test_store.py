"""A spec is the same after a trip through JSON, and what is not a spec is one line."""

import json
from pathlib import Path

import pytest

from shardwise.base.errors import InvalidData
from shardwise.models.catalogue import CATALOGUE
from shardwise.models.make import build_model
from shardwise.models.specs.spec_store import FOLDER, ready_spec
from shardwise.program.spec.store import decode, encode, load_spec, save_spec


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-3.2-1b", "resnet18"])
def test_a_spec_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    spec = ready_spec(name)
    assert spec is not None
    save_spec(spec, tmp_path / "spec.json")
    assert load_spec(tmp_path / "spec.json") == spec
    assert encode(decode(encode(spec))) == encode(spec)


def test_a_shipped_spec_is_that_of_its_catalogue_model() -> None:
    shipped = sorted(path.stem for path in FOLDER.glob("*.json"))
    assert len(shipped) >= 33
    for name in shipped:
        shape, spec = CATALOGUE[name], ready_spec(name, ways=())
        assert spec is not None
        assert spec.num_params == sum(p.numel() for p in build_model(shape, device="meta").parameters()), name
        assert spec.traces == ()


def test_equal_blocks_are_held_once() -> None:
    small, large = (FOLDER / f"llama-3.1-{size}.json" for size in ("8b", "405b"))
    assert abs(large.stat().st_size - small.stat().st_size) < 2000
    spec = ready_spec("llama-3.1-405b", ways={("bf16", "none")})
    assert spec is not None
    assert len(spec.units) == 128
    (trace,) = spec.traces
    assert len(trace.rows) < 30
    assert len(list(trace.expand())) == 4 * (126 + 1) + 5


def test_only_the_traces_that_are_asked_for_are_read() -> None:
    spec = ready_spec("gpt-tiny", ways={("bf16", "full")})
    assert spec is not None
    assert [(trace.computes_in, trace.recompute) for trace in spec.traces] == [("bf16", "full")]
    assert ready_spec("gpt-5") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "name": "x"}', "\ufeff{"])
def test_what_is_not_a_spec_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidData, match="spec.json") as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)


def test_a_spec_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    data = json.loads((FOLDER / "gpt-tiny.json").read_text())
    data["calls"] = [["nowhere"]]
    (tmp_path / "spec.json").write_text(json.dumps(data))
    with pytest.raises(InvalidData, match="nowhere"):
        load_spec(tmp_path / "spec.json")
