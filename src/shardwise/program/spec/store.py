"""Specs as compact JSON: n equal units are one entry; equal streams and equal laws are written once.

units    {"names": ["blocks.", 0, 12], "class": "Block", "params": [["norm1.weight", [768]], …], …}
laws     [[c₀, b₀], …], or all six terms
streams  events and operations as words:
           +a3.0    allocation 0 of the unit, an activation of law 3    -a3.0   its release    -a3   one of another unit
           +g5.7:u  the gradient of a parameter of unit u              =g5.7   it is in parameter.grad
           mm/8/9/1,2,4    an operation: name, law of its FLOPs, of its bytes, of its dimensions
rows     [trigger, unit, call, stream]
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from shardwise.base.errors import InvalidData, ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, parse_json, read_content
from shardwise.program.spec.model import ANNOUNCED, ModelSpec, TensorSpec, UnitSpec
from shardwise.program.spec.step import Act, Law, Op, Run, StepRow, StepTrace, StorageEvent, Stream, What

Item = TypeVar("Item")

FORMAT = 1
"""Increased when older files can no longer be read."""
_MOST_BYTES = 2**28


def save_spec(spec: ModelSpec, path: str | os.PathLike[str]) -> None:
    with atomic_write(path) as file:
        file.write(encode_text(spec).encode() + b"\n")


def encode_text(spec: ModelSpec) -> str:
    return json.dumps(encode(spec), separators=(",", ":"), ensure_ascii=False)


def load_spec(path: str | os.PathLike[str], *, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec:
    """Read a spec with the traces of `ways` (computes in, recompute), or with all."""
    try:
        text = read_content(path, most_bytes=_MOST_BYTES)
    except UnreadableFile as error:
        raise InvalidData(f"{path}: {error}") from error
    return decode_text(text, where=str(path), ways=ways)


def decode_text(text: str | bytes, *, where: str, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec:
    """Return the spec of a text that `encode_text` made; `where` names it in errors."""
    try:
        return decode(parse_json(text), ways=ways)
    except ShardwiseError as error:
        raise InvalidData(f"{where}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidData(f"{where}: is not a spec of format {FORMAT} ({type(error).__name__}: {error})") from error


def encode(spec: ModelSpec) -> dict[str, Any]:
    laws: dict[Law, int] = {}
    streams: dict[tuple[str, str], int] = {}
    traces = [
        {
            "computes_in": trace.computes_in,
            "recompute": trace.recompute,
            "runs": [_pack_names(run.units) for run in trace.runs],
            "rows": [
                [row.trigger, row.unit, row.call, _number(_words(row.stream, laws), streams)] for row in trace.rows
            ],
        }
        for trace in spec.traces
    ]
    return {
        "format": FORMAT,
        "name": spec.name,
        "seq": spec.seq,
        "batch_bytes": _terms(spec.batch_bytes) if spec.batch_bytes is not None else None,
        "units": [_pack_units(group) for group in _grouped(spec.units, name=attrgetter("name"), body=_body)],
        "calls": [_pack_names(group) for group in _grouped(spec.call_order)],
        "laws": [_terms(law) for law in laws],
        "streams": [list(words) for words in streams],
        "traces": traces,
    }


def decode(data: Mapping[str, Any], *, ways: Collection[tuple[str, str]] | None = None) -> ModelSpec:
    """Return the spec of what `encode` made."""
    if data["format"] != FORMAT:
        raise InvalidData(f"is a spec of format {data['format']}, not {FORMAT}")
    laws = [_law(terms) for terms in data["laws"]]

    @cache
    def stream(number: int) -> Stream:
        return _stream(data["streams"][number], laws=laws)

    return ModelSpec(
        name=data["name"],
        seq=data["seq"],
        batch_bytes=_law(data["batch_bytes"]) if data["batch_bytes"] is not None else None,
        units=tuple(unit for group in data["units"] for unit in _unpack_units(group)),
        call_order=tuple(name for group in data["calls"] for name in _unpack_names(group)),
        traces=tuple(
            _trace(trace, stream=stream)
            for trace in data["traces"]
            if ways is None or (trace["computes_in"], trace["recompute"]) in ways
        ),
    )


def _trace(data: Mapping[str, Any], *, stream: Callable[[int], Stream]) -> StepTrace:
    return StepTrace(
        computes_in=data["computes_in"],
        recompute=data["recompute"],
        runs=tuple(Run(units=tuple(_unpack_names(run))) for run in data["runs"]),
        rows=tuple(
            StepRow(trigger=trigger, unit=unit, call=call, stream=stream(number))
            for trigger, unit, call, number in data["rows"]
        ),
    )


# Laws, events and operations


def _terms(law: Law) -> list[int]:
    c0, _, _, b0, _, _ = law.terms
    return [c0, b0] if law.terms == (c0, 0, 0, b0, 0, 0) else list(law.terms)


def _law(terms: Sequence[int]) -> Law:
    if len(terms) == 2:
        return Law((terms[0], 0, 0, terms[1], 0, 0))
    c0, c1, c2, b0, b1, b2 = terms
    return Law((c0, c1, c2, b0, b1, b2))


def _number(value: Item, table: dict[Item, int]) -> int:
    """Return the number of a value in a table, which holds equal values once."""
    return table.setdefault(value, len(table))


def _words(stream: Stream, laws: dict[Law, int]) -> tuple[str, str]:
    events, ops = [], []
    for event in stream.events:
        word = f"{event.act.value}{event.what.value}{_number(event.num_bytes, laws)}"
        word += f"x{event.columns}" if event.columns else ""
        word += "" if event.ordinal is None else f".{event.ordinal}"
        word += f":{event.owner}" if event.owner else ""
        events.append(word + (f"@{event.each_of}" if event.each_of else ""))
    for op in stream.ops:
        word = f"{op.name}/{_number(op.num_flops, laws)}/{_number(op.num_bytes, laws)}"
        ops.append(word + ("/" + ",".join(str(_number(dim, laws)) for dim in op.dims) if op.dims else ""))
    return " ".join(events), " ".join(ops)


_ACTS = {act.value: act for act in Act}
_WHATS = {what.value: what for what in What}


def _stream(words: Sequence[str], *, laws: Sequence[Law]) -> Stream:
    events, ops = words
    return Stream(
        events=tuple(_event(word, laws=laws) for word in events.split()),
        ops=tuple(_op(word, laws=laws) for word in ops.split()),
    )


def _event(word: str, *, laws: Sequence[Law]) -> StorageEvent:
    rest, _, each_of = word.partition("@")
    body, _, owner = rest.partition(":")
    size, dot, ordinal = body[2:].partition(".")
    law, _, columns = size.partition("x")
    return StorageEvent(
        act=_ACTS[body[0]],
        what=_WHATS[body[1]],
        num_bytes=laws[int(law)],
        ordinal=int(ordinal) if dot else None,
        owner=owner,
        each_of=each_of,
        columns=int(columns or 0),
    )


def _op(word: str, *, laws: Sequence[Law]) -> Op:
    name, flops, num_bytes, *dims = word.split("/")
    numbers = dims[0].split(",") if dims else []
    return Op(
        name=name,
        num_flops=laws[int(flops)],
        num_bytes=laws[int(num_bytes)],
        dims=tuple(laws[int(number)] for number in numbers),
    )


# Units


def _grouped(
    items: Sequence[Item], *, name: Callable[[Item], str] = str, body: Callable[[Item], object] = lambda item: None
) -> list[list[Item]]:
    """Group consecutive items of equal body whose names differ only in the number at their end."""
    groups: list[list[Item]] = []
    for item in items:
        last = groups[-1][-1] if groups else None
        if last is not None and _follows(name(last), name(item)) and body(last) == body(item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _follows(first: str, second: str) -> bool:
    (stem, number), (other, next_number) = _split(first), _split(second)
    return stem == other and number is not None and next_number == number + 1


def _split(name: str) -> tuple[str, int | None]:
    stem, dot, last = name.rpartition(".")
    return (stem + dot, int(last)) if last.isdecimal() else (name, None)


def _pack_names(names: Sequence[str]) -> list[Any]:
    """Return [stem, first number, count], or [name]."""
    stem, number = _split(names[0])
    return [stem, number, len(names)] if number is not None else [names[0]]


def _unpack_names(packed: Sequence[Any]) -> Iterable[str]:
    if len(packed) == 1:
        return [packed[0]]
    stem, first, count = packed
    return [f"{stem}{number}" for number in range(first, first + count)]


def _body(unit: UnitSpec) -> dict[str, Any]:
    prefix = unit.name + "."
    return {
        "class": unit.class_name,
        "backward": unit.backward,
        "from_root": unit.from_root,
        "params": [_pack_tensor(param, prefix=prefix) for param in unit.params],
        "buffers": [_pack_tensor(buffer, prefix=prefix) for buffer in unit.buffers],
    }


def _pack_units(units: Sequence[UnitSpec]) -> dict[str, Any]:
    body = {key: value for key, value in _body(units[0]).items() if value and (key, value) != ("backward", ANNOUNCED)}
    return {"names": _pack_names([unit.name for unit in units]), **body}


def _unpack_units(data: Mapping[str, Any]) -> Iterable[UnitSpec]:
    for name in _unpack_names(data["names"]):
        yield UnitSpec(
            name=name,
            class_name=data["class"],
            backward=data.get("backward", ANNOUNCED),
            from_root=data.get("from_root", False),
            params=tuple(_unpack_tensor(param, prefix=name + ".") for param in data.get("params", ())),
            buffers=tuple(_unpack_tensor(buffer, prefix=name + ".") for buffer in data.get("buffers", ())),
        )


def _pack_tensor(tensor: TensorSpec, *, prefix: str) -> list[Any]:
    """Return [name within the unit, shape, fields that differ from the default]; other names begin with a slash."""
    inside = tensor.name.startswith(prefix)
    packed: list[Any] = [tensor.name.removeprefix(prefix) if inside else "/" + tensor.name, list(tensor.shape)]
    default = TensorSpec(name="", shape=())
    options = {
        key: value
        for key in ("dtype", "trainable", "persistent", "keep_fp32", "linear", "aliases")
        if (value := getattr(tensor, key)) != getattr(default, key)
    }
    return [*packed, options] if options else packed


def _unpack_tensor(packed: Sequence[Any], *, prefix: str) -> TensorSpec:
    name, shape, *rest = packed
    options = dict(rest[0]) if rest else {}
    if "aliases" in options:
        options["aliases"] = tuple(options["aliases"])
    return TensorSpec(name=name[1:] if name.startswith("/") else prefix + name, shape=tuple(shape), **options)
