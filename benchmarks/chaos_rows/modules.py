"""Rows 1 and 2: generated modules under every strategy, with placements and a schedule drawn for each.

A start of ranks, and groups for them, cost more than a case: many cases share one.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from cases import adamw, sgd
from drawn import Drawn, drawn_modules
from generated import loss_of, make
from ranks import RankFailed, run_ranks
from scorecard import Asked, Tally
from training import Case, Result, _in_one_process, assert_close, assert_equal, on_ranks

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

_MODULES_AT_ONCE = 5
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCase:
    """One training of a module. `expected`: which of the trainings in one process it must be equal to."""

    what: str
    case: Case
    plan: Plan
    late: bool
    expected: int


def each(rank: int, cases: Sequence[OneCase]) -> list[Result]:
    """One case after the other, on ranks that stay."""
    results = []
    for one in cases:
        results.append(on_ranks(rank, one.case, one.plan, one.late))
        gc.collect()
    return results


def each_in_one_process(rank: int, cases: Sequence[Case], num_ranks: int) -> list[Result]:
    return [_in_one_process(rank, case, num_ranks) for case in cases]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Cases that share ranks. `expected` are trainings in one process; `check` compares with them."""

    cases: Sequence[OneCase]
    num_ranks: int
    expected: Sequence[Case]
    check: Callable[..., None]

    def run(self) -> tuple[list[Result], list[list[Result]] | None]:
        """What one process gives, and what each rank gives; None if any of the cases breaks."""
        limit = _LIMIT_SECONDS + 2 * len(self.cases)
        args = (list(self.expected), self.num_ranks)
        (wanted,) = run_ranks(each_in_one_process, num_ranks=1, args=args, timeout_seconds=limit)
        try:
            return wanted, run_ranks(each, num_ranks=self.num_ranks, args=(self.cases,), timeout_seconds=limit)
        except RankFailed:
            return wanted, None


def check_each(tally: Tally, batches: Iterable[Batch]) -> None:
    """Run the batches; where a case breaks its batch, each case by itself, so that it is named."""
    for batch, (wanted, found) in _two_at_a_time(batches):
        for index, one in enumerate(batch.cases):
            with tally.trying(one.what):
                if found is None:
                    args = (one.case, one.plan, one.late)
                    results = run_ranks(on_ranks, num_ranks=batch.num_ranks, args=args, timeout_seconds=_LIMIT_SECONDS)
                else:
                    results = [of_rank[index] for of_rank in found]
                batch.check(results, wanted[one.expected])


def _two_at_a_time(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Any]]:
    """Each batch and what its run gave. Small jobs wait for each other most of the time: two share the cores well."""
    running: deque[tuple[Batch, Future[Any]]] = deque()
    with ThreadPoolExecutor(2) as threads:
        for batch in batches:
            running.append((batch, threads.submit(batch.run)))
            if len(running) == 2:
                ended, future = running.popleft()
                yield ended, future.result()
        for ended, future in running:
            yield ended, future.result()


def checked(asked: Asked, make_batch: Callable[[int, tuple[Drawn, ...]], Batch], *, short: int) -> Tally:
    """Check batches of modules, for as long as there is time. `make_batch(number of the batch, modules)`."""
    tally = Tally(found={"modules": 0})

    def batches() -> Iterator[Batch]:
        for number, modules in enumerate(_drawn(asked, short=short)):
            tally.found["modules"] += len(modules)
            yield make_batch(number, modules)

    check_each(tally, batches())
    return tally


def cases_of(modules: Sequence[Drawn], expected: Sequence[Case], *, first: int, **plan: Any) -> Iterator[OneCase]:
    """Yield every module under every strategy; each module meets both backends. `first`: shifts which is late."""
    for index, (module, case) in enumerate(zip(modules, expected, strict=True)):
        for place, strategy in enumerate(STRATEGIES):
            late = (first + index + place) % 2 == 0
            what = f"{module}, {strategy}, late {late}"
            yield OneCase(what=what, case=case, plan=module.plan(strategy, **plan), late=late, expected=index)


def two_ranks(asked: Asked) -> Tally:
    def batch(number: int, modules: tuple[Drawn, ...]) -> Batch:
        expected = [_case(module, double=False, num_steps=4) for module in modules]
        cases = list(cases_of(modules, expected, first=number))
        return Batch(cases=cases, num_ranks=2, expected=expected, check=assert_equal)

    return checked(asked, batch, short=100)


def more_ranks(asked: Asked) -> Tally:
    """SGD in fp32, one step, within 1e-6 of each tensor's maximum; AdamW in float64 within 1e-10."""

    def batch(number: int, modules: tuple[Drawn, ...]) -> Batch:
        num_ranks, double = (3, 4)[number % 2], number % 4 < 2
        expected = [_case(module, double=double, num_steps=4 if double else 1) for module in modules]
        cases = list(cases_of(modules, expected, first=number, precision="native" if double else "fp32"))
        check = partial(assert_close, tolerance=1e-10 if double else 1e-6)
        return Batch(cases=cases, num_ranks=num_ranks, expected=expected, check=check)

    return checked(asked, batch, short=50)


def _drawn(asked: Asked, *, short: int) -> Iterator[tuple[Drawn, ...]]:
    """Modules, a few at a time, for as long as there is time."""
    modules = iter(drawn_modules(asked.pick(short=short, long=500), seed=asked.chance.randrange(2**32)))
    while asked.in_time() and (together := tuple(islice(modules, _MODULES_AT_ONCE))):
        yield together


def _case(module: Drawn, *, double: bool, num_steps: int) -> Case:
    return Case(
        make=partial(make, module.layers),
        optimizer=adamw if double or num_steps > 1 else sgd,
        loss=loss_of,
        num_steps=num_steps,
        double=double,
    )
