"""The loss of a language model's trace, replaced by another one.

lean      overwrites the logits with their gradient, chunk by chunk (models/own/lean_loss.py), as catalogue models do
usual     `F.cross_entropy(logits.float(), targets)`: the logits in fp32, their log-softmax, and the gradients of both
kept      the same in a loop that holds the fp32 logits in a variable until backward ends
chunked   the logits and their gradient in the dtype that computes; only a chunk is in fp32 (torchtune, litgpt)
fused     the head and the loss are computed chunk by chunk, so that the logits never exist as a whole (Liger, Arctic)

The rows of each follow from the sizes of the logits and the targets, so that no second trace is needed. Their time is
that of the usual loss: the same bytes are read and written, and the head's products are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwise.base.errors import InvalidModel
from shardwise.program.spec.model import ROOT, ModelSpec
from shardwise.program.spec.step import (
    AFTER_FORWARD,
    BEFORE_BACKWARD,
    Act,
    Law,
    Op,
    StepRow,
    StepTrace,
    StorageEvent,
    Stream,
    What,
)

LEAN, USUAL, KEPT, CHUNKED, FUSED = "lean", "usual", "kept", "chunked", "fused"
LOSSES = (LEAN, USUAL, KEPT, CHUNKED, FUSED)

# torchtune's default. Liger has as many as the vocabulary is wider than the model, Arctic so many that one has a GiB.
_NUM_CHUNKS = {CHUNKED: 8, FUSED: 32}

_SCALAR = Law((4, 0, 0, 0, 0, 0))
_TWO_SCALARS = Law((8, 0, 0, 0, 0, 0))
_NOTHING = Law((0, 0, 0, 0, 0, 0))


def with_loss(spec: ModelSpec, *, loss: str, is_lean: bool) -> ModelSpec:
    """Return the spec with another loss; `is_lean`: it was traced with the lean one, not the usual one."""
    if loss == LEAN:
        return spec
    usual = tuple([_with_usual_loss(trace) for trace in spec.traces]) if is_lean else spec.traces
    if loss == USUAL:
        return replace(spec, traces=usual)
    return replace(spec, traces=tuple(_changed(trace, loss=loss, name=spec.name) for trace in usual))


def _changed(trace: StepTrace, *, loss: str, name: str) -> StepTrace:
    """Return a trace of the usual loss with another one."""
    row = _row(trace, AFTER_FORWARD)
    logits = max((event.num_bytes for event in row.stream.events if _is_left(event)), key=_size, default=_NOTHING)
    wide = logits if trace.computes_in == "fp32" else _times(logits, 2)
    copies = [event for event in row.stream.events if event.act is Act.BORN and event.num_bytes == wide]
    if not copies or not _size(logits):
        raise InvalidModel(f"--loss {loss}: {name} does not end in a cross-entropy of logits, whose memory is known")
    if loss == KEPT:
        events = _with_kept_logits(row, logits=logits, copy=copies[0])
        return _replaced(trace, {id(row): replace(row, stream=replace(row.stream, events=events))})
    grad = next(event for event in reversed(row.stream.events) if event.act is Act.BORN and event.num_bytes == logits)
    chunk = _share(wide, _NUM_CHUNKS[loss])
    events = tuple(_chunked_events(row, logits=logits, wide=wide, grad=grad, chunk=chunk))
    changed = _replaced(trace, {id(row): replace(row, stream=replace(row.stream, events=events))})
    return changed if loss == CHUNKED else _without_logits(changed, logits=logits)


def _is_left(event: StorageEvent) -> bool:
    return event.act is Act.DIED and event.ordinal is None


def _with_kept_logits(row: StepRow, *, logits: Law, copy: StorageEvent) -> tuple[StorageEvent, ...]:
    """Return the events with the logits, in fp32, released at the end: nothing later in the step exceeds the loss."""
    is_cast = copy.num_bytes != logits
    kept = [
        event
        for event in row.stream.events
        if event.act is Act.DIED and (event.ordinal == copy.ordinal if is_cast else _frees(event, logits))
    ][:1]
    return (*(event for event in row.stream.events if event not in kept), *kept)


def _chunked_events(row: StepRow, *, logits: Law, wide: Law, grad: StorageEvent, chunk: Law) -> Iterator[StorageEvent]:
    """Yield the gradient first, into which chunks are written; of a chunk there are three tensors in fp32."""
    yield grad
    numbers = [event.ordinal for event in row.stream.events if event.act is Act.BORN and event.num_bytes == wide][:3]
    chunks = [replace(grad, num_bytes=chunk, ordinal=number) for number in numbers if number != grad.ordinal]
    yield from chunks
    yield from (replace(event, act=Act.DIED) for event in chunks)
    for event in row.stream.events:
        if event.num_bytes not in (logits, wide) or _frees(event, logits):
            yield event


def _without_logits(trace: StepTrace, *, logits: Law) -> StepTrace:
    """Return the trace with a chunk of the logits, and of their gradient, instead of all of them."""
    chunk = _share(logits, _NUM_CHUNKS[FUSED])
    changed = {}
    for row in trace.rows:
        events = tuple(
            replace(event, num_bytes=chunk) if event.num_bytes == logits and event.what is What.ACTIVATION else event
            for event in row.stream.events
        )
        if events != row.stream.events:
            changed[id(row)] = replace(row, stream=replace(row.stream, events=events))
    return _replaced(trace, changed)


def _replaced(trace: StepTrace, rows: Mapping[int, StepRow]) -> StepTrace:
    return replace(trace, rows=tuple(rows.get(id(row), row) for row in trace.rows))


def _with_usual_loss(trace: StepTrace) -> StepTrace:
    lean = _row(trace, AFTER_FORWARD)
    after = _row(trace, BEFORE_BACKWARD)
    # After the targets and the sum, the lean loss makes a chunk of the logits in fp32, which is a fourth of them.
    is_cast = trace.computes_in != "fp32"
    logits = _times(lean.stream.events[2].num_bytes, 2 if is_cast else 4)
    at = next(at for at, event in enumerate(after.stream.events) if _frees(event, logits))
    events, grad = _usual_events(lean, logits=logits, is_cast=is_cast)
    ops = tuple(_usual_ops(lean, logits=logits, is_cast=is_cast)) if lean.stream.ops else ()
    later = list(after.stream.events)
    later[at] = replace(later[at], ordinal=grad)
    changed = {
        id(lean): replace(lean, stream=Stream(events=events, ops=ops)),
        id(after): replace(after, stream=replace(after.stream, events=tuple(later))),
    }
    return _replaced(trace, changed)


def _row(trace: StepTrace, trigger: str) -> StepRow:
    return next(row for row in trace.rows if row.trigger == trigger and row.unit == ROOT)


def _frees(event: StorageEvent, num_bytes: Law) -> bool:
    return event.act is Act.DIED and event.ordinal is None and event.num_bytes == num_bytes


def _usual_events(lean: StepRow, *, logits: Law, is_cast: bool) -> tuple[tuple[StorageEvent, ...], int]:
    """Return the events, and the ordinal of the logits' gradient. `is_cast`: the logits have 16 bits."""
    targets = lean.stream.events[0].num_bytes
    number = lean.stream.events[0].ordinal
    assert number is not None
    # The loss and its gradient, which later rows free.
    loss, ones = _left(lean.stream.events)
    wide = _times(logits, 2) if is_cast else logits
    copy, places, log_probs, total, of_log_probs, of_copy, grad = range(number, number + 7)

    def born(law: Law, ordinal: int) -> StorageEvent:
        return StorageEvent(act=Act.BORN, what=What.ACTIVATION, num_bytes=law, ordinal=ordinal)

    def died(law: Law, ordinal: int | None) -> StorageEvent:
        return StorageEvent(act=Act.DIED, what=What.ACTIVATION, num_bytes=law, ordinal=ordinal)

    events = [
        *([born(wide, copy)] if is_cast else []),
        born(targets, places),
        born(wide, log_probs),
        born(_SCALAR, loss),
        born(_SCALAR, total),
        *([died(wide, copy)] if is_cast else []),
        died(logits, None),
        born(_SCALAR, ones),
        born(wide, of_log_probs),
        died(targets, places),
        died(_SCALAR, total),
        born(wide, of_copy),
        died(wide, of_log_probs),
        died(wide, log_probs),
        *([born(logits, grad), died(wide, of_copy)] if is_cast else []),
    ]
    return tuple(events), grad if is_cast else of_copy


def _left(events: tuple[StorageEvent, ...]) -> list[int]:
    """Return the ordinals of the storages that a row leaves."""
    left = dict.fromkeys(event.ordinal for event in events if event.act is Act.BORN)
    for event in events:
        if event.act is Act.DIED:
            left.pop(event.ordinal, None)
    return [ordinal for ordinal in left if ordinal is not None]


def _usual_ops(lean: StepRow, *, logits: Law, is_cast: bool) -> Iterator[Op]:
    wide = _times(logits, 2) if is_cast else logits
    targets = lean.stream.events[0].num_bytes
    cast = _op("_to_copy", _sum(logits, wide))
    if is_cast:
        yield cast
    yield _op("clone", _times(targets, 2))
    yield _op("_log_softmax", _times(wide, 2))
    yield _op("nll_loss_forward", _sum(_sum(wide, targets), _TWO_SCALARS))
    yield _op("ones_like", _TWO_SCALARS)
    yield _op("nll_loss_backward", _sum(_sum(_times(wide, 2), targets), _TWO_SCALARS))
    yield _op("_log_softmax_backward_data", _times(wide, 3))
    if is_cast:
        yield cast


def _op(name: str, num_bytes: Law) -> Op:
    return Op(name=name, num_flops=_NOTHING, num_bytes=num_bytes)


def _size(law: Law) -> int:
    return law.at(batch=1, seq=1)


def _share(law: Law, count: int) -> Law:
    c0, c1, c2, b0, b1, b2 = law.terms
    return Law((-(-c0 // count), -(-c1 // count), -(-c2 // count), -(-b0 // count), -(-b1 // count), -(-b2 // count)))


def _times(law: Law, factor: int) -> Law:
    c0, c1, c2, b0, b1, b2 = law.terms
    return Law((factor * c0, factor * c1, factor * c2, factor * b0, factor * b1, factor * b2))


def _sum(one: Law, other: Law) -> Law:
    (c0, c1, c2, b0, b1, b2), (d0, d1, d2, e0, e1, e2) = one.terms, other.terms
    return Law((c0 + d0, c1 + d1, c2 + d2, b0 + e0, b1 + e1, b2 + e2))
