"""The loss of a language model's trace, replaced by the usual one.

Catalogue models are traced with the lean loss, which overwrites the logits (models/lean_loss.py). Most PyTorch users
have `F.cross_entropy(logits.float(), targets)`: the logits in fp32, their log-softmax, and the gradients of both. Its
rows follow from the sizes of the logits and the targets, so that no second trace is needed.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.spec.law import Law
from shardwise.spec.model import ROOT, ModelSpec
from shardwise.spec.step import AFTER_FORWARD, BEFORE_BACKWARD, Act, Op, StepRow, StepTrace, StorageEvent, Stream, What

LEAN, USUAL = "lean", "usual"
LOSSES = (LEAN, USUAL)

_SCALAR = Law((4, 0, 0, 0, 0, 0))
_TWO_SCALARS = Law((8, 0, 0, 0, 0, 0))
_NOTHING = Law((0, 0, 0, 0, 0, 0))


def with_usual_loss(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model that was traced with the lean loss, with the usual one."""
    return replace(spec, traces=tuple(map(_with_usual_loss, spec.traces)))


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
    return replace(trace, rows=tuple(changed.get(id(row), row) for row in trace.rows))


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


def _times(law: Law, factor: int) -> Law:
    c0, c1, c2, b0, b1, b2 = law.terms
    return Law((factor * c0, factor * c1, factor * c2, factor * b0, factor * b1, factor * b2))


def _sum(one: Law, other: Law) -> Law:
    (c0, c1, c2, b0, b1, b2), (d0, d1, d2, e0, e1, e2) = one.terms, other.terms
    return Law((c0 + d0, c1 + d1, c2 + d2, b0 + e0, b1 + e1, b2 + e2))
