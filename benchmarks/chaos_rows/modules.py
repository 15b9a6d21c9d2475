"""Rows 1 and 2: generated modules under every strategy, with placements and a schedule drawn for each."""

from functools import partial

from cases import adamw, sgd
from drawn import Drawn, drawn_modules
from generated import loss_of, make
from ranks import run_ranks
from scorecard import Asked, Row, Tally
from training import Case, assert_close, assert_equal, on_ranks, one_process

from shardwise.placement import STRATEGIES

_LIMIT_SECONDS = 120.0


def two_ranks(asked: Asked) -> Tally:
    tally = Tally()
    modules = 0
    for module in drawn_modules(asked.pick(short=100, long=500), seed=asked.chance.randrange(2**32)):
        if not asked.in_time():
            break
        modules += 1
        case = Case(make=partial(make, module.layers), optimizer=adamw, loss=loss_of, num_steps=4)
        expected = one_process(case, num_ranks=2)
        for number, strategy in enumerate(STRATEGIES):
            # Each module meets both backends; in the long run each strategy of it does.
            for late in (False, True) if asked.long else ((modules + number) % 2 == 0,):
                with tally.trying(f"{module}, {strategy}, late {late}"):
                    args = (case, module.plan(strategy), late)
                    results = run_ranks(on_ranks, num_ranks=2, args=args, timeout_seconds=_LIMIT_SECONDS)
                    assert_equal(results, expected)
    tally.found["modules"] = modules
    return tally


def more_ranks(asked: Asked) -> Tally:
    """SGD in fp32, one step, within 1e-6 of each tensor's maximum; AdamW in float64 within 1e-10."""
    tally = Tally()
    modules = 0
    for module in drawn_modules(asked.pick(short=50, long=500), seed=asked.chance.randrange(2**32)):
        if not asked.in_time():
            break
        modules += 1
        num_ranks, double = (3, 4)[modules % 2], modules % 4 < 2
        for number, strategy in enumerate(STRATEGIES):
            with tally.trying(f"{module}, {strategy}, {num_ranks} ranks"):
                _check_close(module, strategy, num_ranks=num_ranks, double=double, late=number % 2 == 0)
    tally.found["modules"] = modules
    return tally


def _check_close(module: Drawn, strategy: str, *, num_ranks: int, double: bool, late: bool) -> None:
    case = Case(
        make=partial(make, module.layers),
        optimizer=adamw if double else sgd,
        loss=loss_of,
        num_steps=4 if double else 1,
        double=double,
    )
    plan = module.plan(strategy, precision="native" if double else "fp32")
    results = run_ranks(on_ranks, num_ranks=num_ranks, args=(case, plan, late), timeout_seconds=_LIMIT_SECONDS)
    assert_close(results, one_process(case, num_ranks=num_ranks), tolerance=1e-10 if double else 1e-6)


ROWS = [
    Row(
        number=1,
        test="generated modules × 5 strategies × random overrides, 2 ranks, also under the late backend",
        must_be="bit-equal to one process",
        run=two_ranks,
        seconds=(110.0, 900.0),
    ),
    Row(
        number=2,
        test="the same on 3 and 4 ranks",
        must_be="within the design's bounds (1e-6 in fp32, 1e-10 in float64)",
        run=more_ranks,
        seconds=(70.0, 420.0),
    ),
]
