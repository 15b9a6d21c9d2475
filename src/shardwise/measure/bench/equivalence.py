"""The gate of a bench: checks that all cases did the same training. No torch here.

It compares the observed dtypes, the norm of each parameter's gradient in step 1, the norm of the full gradient in the
first steps, and the loss of every step. If two cases differ by more than rounding explains, no case is ranked.

The tolerances are counted in unit roundoffs u of the precision (fp32 2⁻²⁴, bf16 2⁻⁸, fp16 2⁻¹¹):

    gradient of a parameter    |a - b| ≤ FIRST · u · larger + FLOOR · u · total
        Weights and batches are equal, so on one rank the same kernels give the same numbers. Only the order in which
        the gradients of N ranks are added differs: each sum is off by at most (N-1)·u of its terms. A norm that an
        engine takes in fp32, to clip, is off by some u itself. `total` is the norm of the full gradient: a gradient
        that is truly 0, such as that of attention's key bias, is rounding noise of that size. In bf16 and fp16, engines
        also round in different places (autocast keeps a layer norm in fp32): about u per value.
    norm of a step's gradient  |a - b| ≤ FIRST · u · GROWTH^(step - 1) · larger
    loss of a step             |a - b| ≤ LOSS · u · GROWTH^(step - 1) · larger, of both and of the first
        Every step starts from weights that are further apart, and Adam turns a gradient that is noise into a full step.
        Trainings with batch norm and few samples are chaotic: differences double from step to step. Once the tolerance
        has grown to PARTED, only the means over the remaining steps are compared.

The constants, with the largest differences measured on a CPU: every pair of our strategies and torch's DDP and
fully_shard, AdamW, micro-batch 4, 30 steps, gpt-tiny on 2, 3 and 4 ranks, vit-digits and resnet-digits on 4. In bf16:
every pair of ddp and fsdp of both, 8 steps, gpt-tiny and vit-digits on 2. fp16 was not measured; it uses those of bf16.

                                    fp32                bf16
    gradients, FIRST (and FLOOR)    14.4 u of 64 (4)    2.5 u of 8 (0.25)
    norms of step 1, 2, 3           14, 21, 34 u        0.2, 0.5, 0.2 u
    LOSS, over GROWTH^(step - 1)    0.8 u of 16         0.03 u of 0.5
    mean of the rest, PARTED        0.25% of 5%         not measured

Most of the 14.4 u comes from torch's norm in fp32. A gradient divided by 3 instead of 4 is off by 33%: in fp32 87,000
times the tolerance, and detected if the gradient is more than a millionth of the total.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType

from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Difference, Equivalence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The tolerances of a precision: `unit` is its unit roundoff; the others are counted in it."""

    unit: float
    first: float
    floor: float
    loss: float


ROUNDING: Mapping[str, Rounding] = MappingProxyType(
    {
        "fp32": Rounding(unit=2.0**-24, first=64.0, floor=4.0, loss=16.0),
        "bf16": Rounding(unit=2.0**-8, first=8.0, floor=0.25, loss=0.5),
        "fp16": Rounding(unit=2.0**-11, first=8.0, floor=0.25, loss=0.5),
    }
)
GROWTH = 2.0
PARTED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The distance of a case from the reference in one value, relative to the tolerance: above 1 they differ.

    kind    "dtypes", "gradients", "norms" or "losses": each causes the next
    text    follows the case's name
    """

    kind: str
    excess: float
    text: str


def compare(cases: Sequence[CaseResult], *, precision: str) -> Equivalence:
    """Compare all cases that ran, each with the case that most others agree with."""
    ran = [case for case in cases if case.losses]
    if not ran:
        return Equivalence(differences=(), largest=0.0)
    rounding = ROUNDING[_coarsest(ran) if precision == "native" else precision]
    reference, num_agreeing = _reference(ran, rounding=rounding)
    other = "the others" if 2 <= num_agreeing >= (len(ran) - 1) / 2 else reference.name
    differences: list[Difference] = []
    largest = 0.0
    for case in ran:
        gaps = list(_gaps(case, reference, rounding=rounding, other=other))
        largest = max([largest, *(gap.excess for gap in gaps)])
        differences += _causes(case, [gap for gap in gaps if gap.excess > 1])
    return Equivalence(differences=tuple(differences), largest=largest)


def _coarsest(ran: Sequence[CaseResult]) -> str:
    """Return the precision with the largest roundoff among the matrix products, for modules that keep their dtypes."""
    seen = {dtype for case in ran for dtype in case.dtypes.get("compute", ())}
    return "bf16" if "bfloat16" in seen else "fp16" if "float16" in seen else "fp32"


def _reference(ran: Sequence[CaseResult], *, rounding: Rounding) -> tuple[CaseResult, int]:
    """Return the case that agrees with most others, and how many these are.

    Of several such cases, the nearest to all others counts, then the first.
    """
    agreeing = dict.fromkeys(range(len(ran)), 0)
    distance = dict.fromkeys(range(len(ran)), 0.0)
    for one, other in combinations(range(len(ran)), 2):
        gaps = _gaps(ran[one], ran[other], rounding=rounding, other="")
        apart = max((gap.excess for gap in gaps), default=0.0)
        for number in (one, other):
            agreeing[number] += apart <= 1
            distance[number] += apart
    best = min(agreeing, key=lambda number: (-agreeing[number], distance[number], number))
    return ran[best], agreeing[best]


def _causes(case: CaseResult, gaps: Sequence[_Gap]) -> Iterator[Difference]:
    """Yield the cause without its effects: unequal dtypes, else gradients, else their norms, else losses."""
    if not gaps:
        return
    of_kind = [gap for gap in gaps if gap.kind == gaps[0].kind]
    if gaps[0].kind == "gradients":
        # The worst parameter; of norms and losses, the first step is reported.
        worst = max(of_kind, key=lambda gap: gap.excess)
        more = f" (and of {len(of_kind) - 1} more)" if len(of_kind) > 1 else ""
        yield Difference(case=case.name, text=f"{case.name}: {worst.text}{more}", excess=worst.excess)
        return
    for gap in of_kind if gaps[0].kind == "dtypes" else of_kind[:1]:
        yield Difference(case=case.name, text=f"{case.name}: {gap.text}", excess=gap.excess)


def _gaps(case: CaseResult, reference: CaseResult, *, rounding: Rounding, other: str) -> Iterator[_Gap]:
    yield from _dtype_gaps(case, reference, other=other)
    yield from _gradient_gaps(case, reference, rounding=rounding, other=other)
    if case.param_norms and reference.param_norms:
        given = [math.hypot(*one.param_norms.values()) for one in (case, reference)]
        what = "the norm of the gradient that the optimizer gets in step 1"
        yield _gap("norms", what, *given, allowed=rounding.first * rounding.unit * max(given), other=other)
    for step, (ours, theirs) in enumerate(zip(case.grad_norms, reference.grad_norms, strict=False), start=1):
        if rounding is ROUNDING["fp16"] and not math.isfinite(ours) and not math.isfinite(theirs):
            # The gradient scaler skips steps until it has found its scale.
            continue
        scale = max(ours, theirs)
        what = f"the norm of the gradient in step {step}"
        yield _gap("norms", what, ours, theirs, allowed=rounding.first * _grown(step, rounding) * scale, other=other)
    yield from _loss_gaps(case, reference, rounding=rounding, other=other)


def _loss_gaps(case: CaseResult, reference: CaseResult, *, rounding: Rounding, other: str) -> Iterator[_Gap]:
    """Compare step by step until the tolerance has grown to PARTED; from then on, compare the means."""
    pairs = list(zip(case.losses, reference.losses, strict=False))
    scale = max(map(abs, pairs[0])) if pairs else 0.0
    later = []
    for step, (ours, theirs) in enumerate(pairs, start=1):
        allowance = rounding.loss * _grown(step, rounding)
        if allowance < PARTED or not (math.isfinite(ours) and math.isfinite(theirs)):
            allowed = allowance * max(scale, abs(ours), abs(theirs))
            yield _gap("losses", f"the loss of step {step}", ours, theirs, allowed=allowed, other=other)
        else:
            later.append((step, ours, theirs))
    if later:
        ours, theirs = (math.fsum(row[side] for row in later) / len(later) for side in (1, 2))
        what = f"the mean loss of steps {later[0][0]} to {later[-1][0]}"
        allowed = PARTED * max(scale, abs(ours), abs(theirs))
        yield _gap("losses", what, ours, theirs, allowed=allowed, other=other)


def _grown(step: int, rounding: Rounding) -> float:
    """Return the unit roundoff times its growth up to a step, limited so that no float overflows."""
    return rounding.unit * GROWTH ** min(step - 1, 100)


def _dtype_gaps(case: CaseResult, reference: CaseResult, *, other: str) -> Iterator[_Gap]:
    """Compare dtypes; a kind that an engine does not report is not a difference."""
    for kind, seen in case.dtypes.items():
        theirs = reference.dtypes.get(kind, ())
        if seen and theirs and set(seen) != set(theirs):
            ours, wanted = (" and ".join(sorted(names)) for names in (seen, theirs))
            text = f"the dtype of {kind} is {ours}, and {wanted} in {other}"
            yield _Gap(kind="dtypes", excess=math.inf, text=text)


def _gradient_gaps(case: CaseResult, reference: CaseResult, *, rounding: Rounding, other: str) -> Iterator[_Gap]:
    """Compare the gradients of step 1 by parameter, if both engines report them."""
    ours, theirs = _before_clipping(case), _before_clipping(reference)
    if not ours or not theirs:
        return
    total = math.hypot(*theirs.values())
    for name in (*theirs, *(name for name in ours if name not in theirs)):
        if name not in ours or name not in theirs:
            count = "no" if name not in ours else "a"
            text = f"there is {count} gradient of {name} in step 1, unlike in {other}"
            yield _Gap(kind="gradients", excess=math.inf, text=text)
            continue
        allowed = rounding.unit * (rounding.first * max(ours[name], theirs[name]) + rounding.floor * total)
        what = f"the gradient of {name} in step 1"
        yield _gap("gradients", what, ours[name], theirs[name], allowed=allowed, other=other)


def _before_clipping(case: CaseResult) -> dict[str, float]:
    """Return the norms of step 1 before clipping.

    After clipping, one gradient that is too large makes all others too small, and the wrong ones would be named.
    """
    total = math.hypot(*case.param_norms.values())
    known = case.grad_norms and math.isfinite(case.grad_norms[0]) and 0 < total < math.inf
    scale = case.grad_norms[0] / total if known else 1.0
    return {name: norm * scale for name, norm in case.param_norms.items()}


def _gap(kind: str, what: str, ours: float, theirs: float, *, allowed: float, other: str) -> _Gap:
    """Compare two numbers; a value that is not finite is always a difference."""
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return _Gap(kind=kind, excess=math.inf, text=f"{what} is {ours:g}, that of {other} {theirs:g}")
    apart = abs(ours - theirs)
    excess = apart / allowed if allowed else math.inf if apart else 0.0
    ratio = ours / theirs if theirs else math.inf
    by = f"{ratio:.4g} times that of {other}" if 0.01 < abs(ratio - 1) < 100 else f"not that of {other}"
    return _Gap(kind=kind, excess=excess, text=f"{what} is {by} ({ours:.7g}, {theirs:.7g})")
