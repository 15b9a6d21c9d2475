"""A config of a known architecture needs no trace: its spec follows from its sizes, and equals a traced one."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from whole import whole

from shardwise.models.reference import Model
from shardwise.models.specs import architecture
from shardwise.models.specs.architecture import FOLDER, architecture_of, value_of
from shardwise.plan import Plan
from shardwise.program.spec import ROOT, ModelSpec
from shardwise.program.spec.step import Act, Law, StepTrace, StorageEvent

# None of these is among the sizes that the laws were fitted to.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
}
STORED = sorted(path.stem for path in FOLDER.glob("*.json"))
# Each kind of model once; tied or not, and large or not, is a matter of the root.
USUAL = ("llama-tied", "mistral-small", "qwen2-large", "qwen3-tied")
SEQ = 1536


def config_of(name: str, **others: Any) -> dict[str, Any]:
    kind, *heads, embeddings = name.split("-")
    named = {"olmo2": "Olmo2", "phi3": "Phi3"}.get(kind, kind.capitalize())
    own: dict[str, Any] = {"sliding_window": None} if kind in ("mistral", "phi3") else {}
    if heads == ["ungrouped"]:
        own["num_key_value_heads"] = SIZES["num_attention_heads"]
    if embeddings == "small":
        own["vocab_size"] = 32_000
    about = {"model_type": kind, "architectures": [f"{named}ForCausalLM"], "tie_word_embeddings": embeddings == "tied"}
    return {**about, "dtype": "bfloat16", "max_position_embeddings": 4096, **SIZES, **own, **others}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def at_length(spec: ModelSpec, seq: int) -> ModelSpec:
    """Return the spec with laws of the batch alone, as a trace at one length has them, and traces in one order.

    The operations of a row are sorted: where two are arguments of one call in autograd's C++, as in pow's backward, the
    compiler of a torch build chooses their order. The stored laws and a trace may be of different builds.
    """

    def law(one: Law) -> Law:
        line = one.line(seq)
        return Law((line.const, 0, 0, line.per_sample, 0, 0))

    rows = {
        trace: tuple(
            replace(
                row,
                stream=replace(
                    row.stream,
                    events=tuple(replace(one, num_bytes=law(one.num_bytes)) for one in row.stream.events),
                    ops=tuple(
                        sorted(
                            (
                                replace(
                                    one,
                                    num_flops=law(one.num_flops),
                                    num_bytes=law(one.num_bytes),
                                    dims=tuple(map(law, one.dims)),
                                )
                                for one in row.stream.ops
                            ),
                            key=repr,
                        )
                    ),
                ),
            )
            for row in trace.rows
        )
        for trace in spec.traces
    }
    assert spec.batch_bytes is not None
    return replace(
        spec,
        batch_bytes=law(spec.batch_bytes),
        traces=tuple(replace(trace, rows=rows[trace]) for trace in sorted(spec.traces, key=lambda one: one.recompute)),
    )


def of_this_torch(spec: ModelSpec) -> ModelSpec:
    """Return the spec as a trace under the installed torch gives it; the laws were traced under a later one than 2.11.

    A unit's checkpoint holds its inputs until its backward ends. torch 2.11 saves them in a node of autograd, which
    releases the first one first; since 2.12 they are in a list, of which Python releases the last one first. What the
    root allocated for all units therefore dies in the opposite order.
    """
    if torch.__version__ >= TorchVersion("2.12"):
        return spec

    def is_of_root(event: StorageEvent) -> bool:
        return event.act is Act.DIED and event.owner == ROOT

    def reversed_releases(events: tuple[StorageEvent, ...]) -> tuple[StorageEvent, ...]:
        runs = [(of_root, list(run)) for of_root, run in groupby(events, key=is_of_root)]
        return tuple(event for of_root, run in runs for event in (reversed(run) if of_root else run))

    def recomputed(trace: StepTrace) -> StepTrace:
        rows = (
            replace(row, stream=replace(row.stream, events=reversed_releases(row.stream.events))) for row in trace.rows
        )
        return replace(trace, rows=tuple(rows))

    return replace(
        spec, traces=tuple(recomputed(trace) if trace.recompute == "full" else trace for trace in spec.traces)
    )


@pytest.mark.parametrize("name", [*USUAL, *whole(*(name for name in STORED if name not in USUAL))])
def test_the_laws_give_the_spec_that_a_trace_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recompute = {STORED[0]: "full", "qwen2-large": "selective"}.get(name, "none")
    plan = Plan(precision="bf16", recompute=recompute, micro_batch=2)
    folder = write(tmp_path, config_of(name))
    found = architecture_of(folder, seq=SEQ)
    if recompute == "selective":
        monkeypatch.setattr(Model, "_traced", None)
    assert found is not None, (
        "traced with another version of transformers: python -m shardwise.models.specs.ship_architectures"
    )
    by_laws = Model(f"hf:{folder}", seq=SEQ).spec_for(plan)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shardwise.models.specs.spec_store.architecture_for", lambda request: None)
    traced = Model(f"hf:{folder}", seq=SEQ).spec_for(plan)
    assert at_length(of_this_torch(by_laws), SEQ) == at_length(traced, SEQ)


def test_a_known_architecture_is_not_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, config_of("qwen3-tied"))
    monkeypatch.setattr(Model, "_traced", None)
    spec = Model(f"hf:{folder}").spec_for(Plan(precision="bf16", micro_batch=1))
    assert (spec.num_params, spec.seq, len(spec.units)) == (596_049_920, 2048, 29)


def test_config_without_a_dtype_has_fp32_weights_and_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "_traced", None)
    plan, layers = Plan(precision="bf16", micro_batch=1), ["full_attention"] * SIZES["num_hidden_layers"]
    half = Model(f"hf:{write(tmp_path, config_of('qwen2-large'))}").spec_for(plan)
    config = config_of("qwen2-large", layer_types=layers, use_mrope=False)
    del config["dtype"]
    full = Model(f"hf:{write(tmp_path, config)}").spec_for(plan)
    dtypes = [{one.dtype for unit in spec.units for one in unit.params} for spec in (half, full)]
    assert dtypes == [{"bfloat16"}, {"float32"}]
    assert half.traces == full.traces


def test_heads_that_share_nothing_have_laws_of_their_own(tmp_path: Path) -> None:
    config = config_of("llama-ungrouped-large")
    assert architecture_of(write(tmp_path, config), seq=2048) is not None
    # Configs of the first Llama do not name the heads of keys.
    del config["num_key_value_heads"]
    found = architecture_of(write(tmp_path, config), seq=2048)
    assert found is not None
    assert found.sizes["g"] == found.sizes["a"] == SIZES["num_attention_heads"]


@pytest.mark.parametrize(
    "other",
    [
        {"quantization_config": {}},
        {"dtype": "float16"},
        {"layer_types": ["full_attention", "sliding_attention"] * 14},
        {"layer_types": ["full_attention"]},
        {"use_mrope": True},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"num_key_value_heads": 16},
        {"num_hidden_layers": 4},
        {"head_dim": 80},
        {"hidden_size": None},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"model_type": "../qwen3"},
    ],
)
def test_any_other_config_is_traced(other: dict[str, Any], tmp_path: Path) -> None:
    assert architecture_of(write(tmp_path, config_of("qwen3-tied")), seq=2048) is not None
    assert architecture_of(write(tmp_path, config_of("qwen3-tied", **other)), seq=2048) is None


def test_other_lengths_and_versions_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, config_of("qwen3-tied"))
    assert architecture_of(folder, seq=1000) is None
    monkeypatch.setattr(architecture, "_installed", lambda: "4.40")
    assert architecture_of(folder, seq=1024) is None
    monkeypatch.setattr(architecture, "_installed", lambda: "")
    assert architecture_of(folder, seq=1024) is not None


@pytest.mark.parametrize(
    ("polynomial", "value"), [("2hf+4k-1", 2 * 3 * 5 + 4 * 7 - 1), ("1/2h", 1), ("-3", -3), ("1l", 11)]
)
def test_polynomials(polynomial: str, value: int) -> None:
    assert value_of(polynomial, {"h": 3, "f": 5, "k": 7, "l": 11}) == value
