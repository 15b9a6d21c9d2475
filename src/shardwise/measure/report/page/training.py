"""The training: loss curves, gradient norms and dtypes."""

import math
from collections.abc import Sequence

from shardwise.base.vocabulary.quantities import scientific
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.axes import Tick, between, round_step
from shardwise.measure.report.page.bars import key
from shardwise.measure.report.page.markup import Markup, join, numbers_below, small, table
from shardwise.measure.report.page.plots import Curve, PlotFrame, curve_plot
from shardwise.measure.report.page.section import PageSection, section

_HEIGHT = 160
_NUM_COLOURS = 8


def loss_section(bench: Bench) -> PageSection | None:
    """Draw all loss curves in one plot, and say how far apart they are."""
    cases = [case for case in bench.ran if case.losses]
    if not cases:
        return None
    curves = [
        Curve(name=case.name, kind=f"case-{at % _NUM_COLOURS}", values=case.losses) for at, case in enumerate(cases)
    ]
    return section(
        "loss",
        "Loss",
        *map(small, _in_words(cases, agrees=bench.equivalence.agrees)),
        key({curve.kind: curve.name for curve in curves}) if 1 < len(curves) <= _NUM_COLOURS else None,
        _plot(curves, below=_steps(cases)),
        numbers_below(
            join([_loss_table(cases), _norm_table(cases)]),
            "From the first step on, the mean over ranks; gradient norms are of the whole gradient, before clipping. "
            "The dashes take turns, so that every one of several equal curves shows.",
            what="Losses, gradient norms and dtypes",
        ),
        look="half",
    )


def _plot(curves: Sequence[Curve], *, below: Sequence[Tick]) -> Markup | None:
    """Draw the curves; None if no loss is finite."""
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if not values:
        return None
    room = (max(values) - min(values)) * 0.05 or 0.05 * abs(max(values)) or 1.0
    low, high = min(values) - room, max(values) + room
    frame = PlotFrame(low=low, high=high, ticks=between(low, high), below=below, height=_HEIGHT)
    return curve_plot(curves, frame=frame, describe="Loss of each case by step")


def _steps(cases: Sequence[CaseResult]) -> list[Tick]:
    last = max(len(case.losses) for case in cases)
    if last == 1:
        return [(0.0, "step 1")]
    every = max(1, round(round_step(last, num_steps=5)))
    # Labels too close to the first would overlap it.
    shown = [step for step in range(every, last + 1, every) if step - 1 > 0.12 * (last - 1)]
    return [(0.0, "step 1"), *(((step - 1) / (last - 1), f"{step:,}") for step in shown)]


def _in_words(cases: Sequence[CaseResult], *, agrees: bool) -> list[str]:
    """Say which cases have losses that are not finite, else the largest difference between two cases."""
    lost = [
        f"{case.name}: the loss is no number from step {step} on."
        for case in cases
        for step in [next((at for at, loss in enumerate(case.losses, 1) if not math.isfinite(loss)), None)]
        if step is not None
    ]
    if lost or len(cases) < 2:
        return lost
    steps = enumerate(zip(*(case.losses for case in cases), strict=False), 1)
    step, values = max(steps, key=lambda one: max(one[1]) - min(one[1]))
    difference, size = max(values) - min(values), max(map(abs, values)) or 1.0
    if difference == 0:
        return [f"All {len(cases)} curves are the same, to the last digit, at every step."]
    number = f"{scientific(difference)}, which is {scientific(difference / size)} of the loss, at step {step}"
    if agrees:
        return [f"All {len(cases)} curves coincide: two losses of one step differ by at most {number}."]
    return [f"Two losses of one step differ by up to {number}."]


def _loss_table(cases: Sequence[CaseResult]) -> Markup:
    last = max(len(case.losses) for case in cases)
    return table(
        ["step", *(case.name for case in cases)],
        [
            [f"{step + 1}", *(f"{case.losses[step]:.7g}" if step < len(case.losses) else "–" for case in cases)]
            for step in range(last)
        ],
    )


def _norm_table(cases: Sequence[CaseResult]) -> Markup:
    last = max(len(case.grad_norms) for case in cases)
    kinds = list(dict.fromkeys(kind for case in cases for kind in case.dtypes))
    return table(
        ["case", *(f"norm {step + 1}" for step in range(last)), *kinds],
        [
            [
                case.name,
                *(f"{case.grad_norms[at]:.7g}" if at < len(case.grad_norms) else "–" for at in range(last)),
                *(", ".join(case.dtypes.get(kind, ())) or "–" for kind in kinds),
            ]
            for case in cases
        ],
    )
