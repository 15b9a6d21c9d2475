"""The top of the page: what was compared, the verdict, its key numbers, and whether all cases did the same training."""

import math
from datetime import datetime

from shardwise.base.vocabulary.quantities import bytes_text, digits, seconds_text
from shardwise.measure.bench.case_result import NOT_MEASURABLE, NOT_MEASURED, CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.markup import Markup, element, join, small, table
from shardwise.measure.report.page.section import PageSection, exposed_text, is_chosen, off_text, section, shown

_TOO_NOISY = "Too noisy to rank"
_TILES = {
    "step time": "Step time",
    "samples/s": "Samples/s",
    "tokens/s": "Tokens/s",
    "peak per rank": "Peak memory per rank",
    "exposed communication": "Exposed communication",
    "sent per rank per step": "Sent per rank per step",
    "time to first step": "Time to first step",
}
"""Column of the table → title of the tile."""


def heading(bench: Bench) -> Markup:
    model = shown(bench.settings.get("task.model"))
    ranks = "1 rank" if bench.num_ranks == 1 else f"{bench.num_ranks:,} ranks"
    facts = [
        model if model not in ("–", bench.name) else None,
        f"{ranks} on {shown(bench.machine['device'])}" if "device" in bench.machine else None,
        shown(bench.settings["plan.precision"]) if "plan.precision" in bench.settings else None,
        f"{bench.step_samples:,} samples per step" if bench.step_samples else None,
        f"torch {shown(bench.machine['torch'])}" if "torch" in bench.machine else None,
        _date(bench.made),
    ]
    return element(
        "header",
        element("p", "Shardwise bench", class_="kicker"),
        element("h1", bench.name),
        element("p", *(element("span", fact) for fact in facts if fact), class_="facts"),
    )


def verdict(bench: Bench) -> Markup | None:
    """Say which case to use and why, or why none is recommended."""
    if not bench.equivalence.agrees:
        return _refusal(bench)
    if not bench.ran:
        return element("div", element("h2", "Nothing ran"), _lines(bench.why), class_="answer refused")
    same = _equivalence_line(bench)
    if bench.recommended is not None:
        name = bench.cases[bench.recommended].name
        # The reason may begin with the text of the heading.
        reason = bench.why.removeprefix(f"Use {name}: ")
        return element("div", element("h2", "Use ", element("em", name)), _lines(reason), same, class_="answer")
    if bench.why.startswith(f"{_TOO_NOISY}: "):
        reason = bench.why.removeprefix(f"{_TOO_NOISY}: ")
        reason = reason[:1].upper() + reason[1:]
        return element("div", element("h2", _TOO_NOISY), _lines(reason), same, class_="answer open")
    return element("div", _lines(bench.why), same, class_="answer open") if bench.why else same


def tiles(bench: Bench) -> Markup | None:
    """Show the numbers of the recommended case, or of the only one."""
    cases = bench.ran
    if not cases or not bench.equivalence.agrees:
        return None
    chosen = next((case for case in cases if is_chosen(bench, case)), cases[0] if len(cases) == 1 else None)
    if chosen is None:
        return None
    numbers = _numbers(bench, chosen)
    each = (
        # Words are smaller than numbers.
        element("div", element("dt", title), element("dd", value, class_="words" if value == NOT_MEASURABLE else None))
        for title, value in ((title, numbers[name]) for name, title in _TILES.items())
        if value is not None
    )
    return element("dl", *each, class_="tiles", aria_label=f"Key numbers of {chosen.name}")


def cases_section(bench: Bench) -> PageSection | None:
    """Show the numbers of all cases as a table."""
    cases = bench.ran
    if len(cases) < 2 or not bench.equivalence.agrees:
        return None
    return section(
        "numbers",
        "All cases",
        _all_cases(bench, cases),
        small(
            "Medians over blocks of steps in all runs, each run in fresh processes and in turn with the others; ± is "
            "the interquartile range. Peak: live bytes on the rank with the highest peak. First step: from the start "
            "of a process until it has taken one, compilation included."
        ),
    )


def _equivalence_line(bench: Bench) -> Markup | None:
    """Say that the cases agree, if there are at least two."""
    num_cases = len(bench.ran)
    if num_cases < 2:
        return None
    return element(
        "p",
        element("b", "Same training. "),
        f"Losses and gradient norms of all {num_cases} cases agree: the largest difference is "
        f"{100 * bench.equivalence.largest:.2g}% of the rounding tolerance.",
        class_="same",
    )


def _numbers(bench: Bench, case: CaseResult) -> dict[str, str | None]:
    """Return the columns of the table; None if a number is unknown."""
    samples, tokens, first = bench.samples_per_s(case), bench.tokens_per_s(case), case.first_step_seconds
    return {
        "samples/s": None if samples is None else digits(samples),
        "tokens/s": None if tokens is None else digits(tokens),
        "step time": seconds_text(case.seconds),
        "±": off_text(case),
        "exposed communication": None if case.why_not_exposed == NOT_MEASURED else exposed_text(case),
        "peak per rank": bytes_text(case.peak_bytes) if case.allocated_bytes else None,
        "sent per rank per step": None if case.sent_bytes is None else bytes_text(case.sent_bytes),
        "time to first step": None if first is None else seconds_text(first.median),
    }


def _all_cases(bench: Bench, cases: list[CaseResult]) -> Markup:
    numbers = [_numbers(bench, case) for case in cases]
    # Only language models have tokens, and one rank does not communicate.
    optional = [name for name in ("tokens/s", "exposed communication") if all(row[name] is None for row in numbers)]
    header = [name for name in numbers[0] if name not in optional]
    names = [element("b", case.name, class_="chosen" if is_chosen(bench, case) else None) for case in cases]
    rows = [[name, *(row[head] or "–" for head in header)] for name, row in zip(names, numbers, strict=True)]
    return table(["case", *header], rows)


def _refusal(bench: Bench) -> Markup:
    differences = []
    for one in bench.equivalence.differences:
        # Rounding cannot cause some differences at all, such as those of dtypes.
        is_finite = math.isfinite(one.excess)
        excess = f"; {digits(one.excess)} times the rounding tolerance" if is_finite else None
        text = f": {one.text.removeprefix(f'{one.case}: ')}"
        differences.append(element("li", element("b", one.case), text, excess))
    return element(
        "div",
        element("h2", "These cases did not do the same training"),
        element("p", "So they are not ranked, and none is recommended. What each of them took is in bench.json."),
        element("ul", *differences),
        _lines(bench.why),
        class_="answer refused",
        role="alert",
    )


def _lines(text: str) -> Markup:
    return join(element("p", line) for line in text.splitlines() if line)


def _date(text: str) -> str:
    """Format a date to the minute; other text stays as it is."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z")
    except ValueError:
        return text
