"""Traces architectures of the transformers library at several widths and stores the laws of their sizes.

python -m shardwise.models.specs.ship_architectures [NAME …]     (default: all of VARIANTS)
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import nn

from shardwise.base.files.atomic import atomic_write
from shardwise.models.specs.architecture import FOLDER, SIZES, short_version
from shardwise.models.tasks.transformers_task import task_of_model
from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.models.transformers_model import imported, model_of_config
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import Law, StepTrace, Stream
from shardwise.program.spec.store import encode

WAYS = tuple(Way(computes_in="bf16", recompute=how) for how in ("none", "selective", "full"))
LENGTHS = (2048, 1024, 512)
# No two products of sizes are equal, and none of them is a constant of a kernel. All embeddings are large.
SAMPLES = tuple(
    dict(zip(SIZES, sizes, strict=True))
    for sizes in (
        (1536, 4224, 12, 4, 64, 50304, 8),
        (1024, 2816, 16, 2, 128, 66048, 9),
        (1280, 3328, 20, 5, 128, 64256, 10),
        (2304, 5888, 18, 6, 64, 40064, 11),
        (1792, 6016, 14, 7, 64, 70400, 12),
        (768, 1920, 24, 8, 128, 90112, 13),
    )
)
_PRODUCTS = ("", "h", "f", "a", "g", "d", "v", "l", "ad", "gd", "hf", "had", "hgd", "hv")
_MOST_TERMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`fixed`: key of the config → the values with which it holds; traced with the first.

    is_grouped    several heads share keys and values; if not, nothing repeats them, and operations differ
    is_large      the embedding and the head are units (spec.model.LARGE_ROOT_LAYER), or not; None: they are tied
    """

    model_type: str
    fixed: Mapping[str, Sequence[Any]]
    has_default_head_dim: bool = False
    is_grouped: bool = True
    is_large: bool | None = None

    @property
    def samples(self) -> tuple[dict[str, int], ...]:
        return SAMPLES if self.is_grouped else tuple({**sizes, "g": sizes["a"]} for sizes in SAMPLES)


_COMMON: dict[str, Sequence[Any]] = {"hidden_act": ["silu"], "attention_dropout": [0.0]}
_LLAMA = {**_COMMON, "attention_bias": [False], "mlp_bias": [False]}
_QWEN = {**_COMMON, "use_sliding_window": [False], "sliding_window": [None, 4096, 32768, 131072], "use_mrope": [False]}
_PHI = {**_COMMON, "attention_bias": [False], "resid_pdrop": [0.0], "embd_pdrop": [0.0], "sliding_window": [None]}
_KINDS: dict[str, tuple[dict[str, Sequence[Any]], bool]] = {
    "llama": (_LLAMA, True),
    "qwen2": (_QWEN, True),
    "qwen3": ({**_QWEN, "attention_bias": [False]}, False),
    "mistral": ({**_COMMON, "sliding_window": [None]}, True),
    "olmo2": ({**_COMMON, "attention_bias": [False]}, True),
    "phi3": ({**_PHI, "partial_rotary_factor": [1.0]}, True),
}
_NAMES = (
    *("llama-tied", "qwen2-tied", "qwen3-tied"),
    *(
        f"{kind}-{size}"
        for kind in (
            *("llama", "llama-ungrouped", "qwen2", "qwen2-ungrouped", "qwen3", "mistral"),
            *("olmo2", "olmo2-ungrouped", "phi3"),
        )
        for size in ("large", "small")
    ),
)


def _variant(name: str) -> Variant:
    kind, *heads, embeddings = name.split("-")
    fixed, has_default = _KINDS[kind]
    return Variant(
        model_type=kind,
        fixed={**fixed, "tie_word_embeddings": [embeddings == "tied"]},
        has_default_head_dim=has_default,
        is_grouped=heads != ["ungrouped"],
        is_large={"tied": None, "large": True, "small": False}[embeddings],
    )


VARIANTS = {name: _variant(name) for name in _NAMES}


def make_laws(variant: Variant) -> dict[str, Any]:
    """Return the contents of an architecture's file."""
    return {
        "transformers": short_version(version("transformers")),
        "fixed": dict(variant.fixed),
        "has_default_head_dim": variant.has_default_head_dim,
        "is_grouped": variant.is_grouped,
        "is_large": variant.is_large,
        "head_dims": [64, 128],
        "spec": _Fitted().encoded([traced(variant, sizes) for sizes in variant.samples]),
    }


def traced(variant: Variant, sizes: Mapping[str, int]) -> ModelSpec:
    """Return the spec of one model of the architecture, with laws for every length."""
    transformers = imported("transformers", needed_for="shipping architectures")
    given = {SIZES[letter]: size for letter, size in sizes.items()}
    fixed = {key: values[0] for key, values in variant.fixed.items() if values[0] is not None}
    config = transformers.AutoConfig.for_model(variant.model_type, **given, **fixed, dtype="bfloat16")
    with torch.device("meta"):
        model: nn.Module = model_of_config(config)
    tasks = {length: task_of_model(model, seq=length) for length in LENGTHS}
    makers = {length: task.make_batch for length, task in tasks.items()}
    return trace_model(
        model,
        loss=tasks[LENGTHS[0]].loss,
        make_batch=makers,
        name=variant.model_type,
        ways=WAYS,
        policy="blocks" if variant.is_large is False else "auto",
    )


@dataclass(slots=True, kw_only=True)
class _Fitted:
    """The specs of all samples as one, in which a number stands for each polynomial."""

    laws: dict[tuple[Law, ...], int] = field(default_factory=dict)

    def encoded(self, specs: Sequence[ModelSpec]) -> dict[str, Any]:
        first = specs[0]
        merged = replace(
            first,
            batch_bytes=self._law([_given(spec.batch_bytes) for spec in specs]),
            traces=tuple(self._trace(traces) for traces in zip(*(spec.traces for spec in specs), strict=True)),
        )
        data = encode(merged)
        numbered = list(self.laws)
        data["laws"] = [_polynomials(numbered[terms[0]]) for terms in data["laws"]]
        data["batch_bytes"] = _polynomials(numbered[data["batch_bytes"][0]])
        last = SAMPLES[0]["l"] - 1
        text = re.sub(rf"\blayers\.{last}\b", "layers.{last}", json.dumps(data, separators=(",", ":")))
        data = dict(json.loads(text))
        for group, *others in zip(data["units"], *(encode(spec)["units"] for spec in specs[1:]), strict=True):
            self._fit_unit(group, others)
        data["calls"] = [_counted(packed) for packed in data["calls"]]
        for trace in data["traces"]:
            trace["runs"] = [_counted(packed) for packed in trace["runs"]]
        return data

    def _fit_unit(self, group: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        group["names"] = _counted(group["names"])
        for kind in ("params", "buffers"):
            for tensor, *same in zip(group.get(kind, ()), *(other.get(kind, ()) for other in others), strict=True):
                shapes = zip(tensor[1], *(one[1] for one in same), strict=True)
                tensor[1] = [_polynomial(sizes) for sizes in shapes]

    def _trace(self, traces: Sequence[StepTrace]) -> StepTrace:
        rows = zip(*(trace.rows for trace in traces), strict=True)
        return replace(
            traces[0],
            rows=tuple(replace(row[0], stream=self._stream([one.stream for one in row])) for row in rows),
        )

    def _stream(self, streams: Sequence[Stream]) -> Stream:
        events = zip(*(stream.events for stream in streams), strict=True)
        ops = zip(*(stream.ops for stream in streams), strict=True)
        return Stream(
            events=tuple(
                replace(
                    _alike(event, lambda one: (one.act, one.what, one.ordinal)),
                    num_bytes=self._law([one.num_bytes for one in event]),
                    columns=_columns([one.columns for one in event]),
                )
                for event in events
            ),
            ops=tuple(
                replace(
                    _alike(op, lambda one: (one.name, len(one.dims))),
                    num_flops=self._law([one.num_flops for one in op]),
                    num_bytes=self._law([one.num_bytes for one in op]),
                    dims=tuple(self._law(dims) for dims in zip(*(one.dims for one in op), strict=True)),
                )
                for op in ops
            ),
        )

    def _law(self, laws: Sequence[Law]) -> Law:
        return Law((self.laws.setdefault(tuple(laws), len(self.laws)), 0, 0, 0, 0, 0))


def _alike(items: Sequence[Any], key: Callable[[Any], object]) -> Any:
    if len({key(item) for item in items}) > 1:
        raise ValueError(f"models of different widths differ in {items[0]}")
    return items[0]


def _given(law: Law | None) -> Law:
    assert law is not None
    return law


class _Columns(int):
    """A number of columns that is written as a polynomial."""

    polynomial: str

    def __str__(self) -> str:
        return f"{{{self.polynomial}}}"

    def __format__(self, _: str) -> str:
        return str(self)


def _columns(values: Sequence[int]) -> int:
    if not any(values):
        return 0
    found = _Columns(values[0])
    fitted = _polynomial(values)
    found.polynomial = fitted["="] if isinstance(fitted, dict) else str(fitted)
    return found


def _polynomials(laws: Sequence[Law]) -> list[Any]:
    terms = [_polynomial(values) for values in zip(*(law.terms for law in laws), strict=True)]
    return [terms[0], terms[3]] if [terms[i] for i in (1, 2, 4, 5)] == [0, 0, 0, 0] else terms


def _counted(packed: Sequence[Any]) -> list[Any]:
    """Return the names of all blocks with their number as a size."""
    return [*packed[:2], {"=": "1l"}] if len(packed) == 3 and packed[2] == SAMPLES[0]["l"] else list(packed)


def _polynomial(values: Sequence[int]) -> Any:
    """Return a number, or the polynomial with the fewest terms that passes through the values at all samples."""
    return values[0] if len(set(values)) == 1 else {"=": _fit(tuple(values))}


@cache
def _fit(values: tuple[int, ...]) -> str:
    for products in _subsets():
        columns = [_values_of(product) for product in products]
        factors = _solved(columns, values)
        if factors is not None and all(factors):
            return "".join(map(_term, factors, products)).removeprefix("+")
    raise ValueError(f"no polynomial of the sizes passes through {values}")


def _term(factor: Fraction, product: str) -> str:
    return f"{'+' if factor > 0 else ''}{factor}{product}"


def _subsets() -> Iterator[tuple[str, ...]]:
    for count in range(1, _MOST_TERMS + 1):
        yield from combinations(_PRODUCTS, count)


@cache
def _values_of(product: str) -> tuple[int, ...]:
    return tuple(prod(sizes[letter] for letter in product) for sizes in SAMPLES)


def _solved(columns: Sequence[tuple[int, ...]], values: tuple[int, ...]) -> list[Fraction] | None:
    """Return the factors by which the columns add up to the values, exactly; None if there are none."""
    rows = [[Fraction(column[index]) for column in columns] + [Fraction(value)] for index, value in enumerate(values)]
    for pivot in range(len(columns)):
        found = next((row for row in rows[pivot:] if row[pivot]), None)
        if found is None:
            return None
        rows.remove(found)
        found = [entry / found[pivot] for entry in found]
        rows = [[a - row[pivot] * b for a, b in zip(row, found, strict=True)] for row in rows]
        rows.insert(pivot, found)
    is_exact = not any(row[-1] for row in rows[len(columns) :])
    return [row[-1] for row in rows[: len(columns)]] if is_exact else None


def main(names: list[str]) -> None:
    for name in names or VARIANTS:
        path = FOLDER / f"{name}.json"
        text = json.dumps(make_laws(VARIANTS[name]), separators=(",", ":"))
        with atomic_write(path) as file:
            file.write(text.encode() + b"\n")
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
