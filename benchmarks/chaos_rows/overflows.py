"""Row 14: an Inf or NaN that one rank alone has."""

import test_nonfinite as nonfinite
import test_precision as precision
from ranks import run_ranks
from scorecard import Asked, Fault, Tally

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

_LIMIT_SECONDS = 200.0


def one_ranks_overflow(asked: Asked) -> Tally:
    """In a rank's own slice of the gradients, in its forward, and in its samples under `train`."""
    tally = Tally()
    for _ in range(asked.pick(short=6, long=40)):
        num_ranks = asked.chance.randint(2, 4)
        planted, fused = asked.chance.randrange(num_ranks), asked.chance.random() < 0.5
        # Where gradients are replicated no rank has one of its own.
        strategy = asked.chance.choice(["zero1", "zero2", "shard_grad_op", "fsdp"])
        with tally.trying(f"a slice of rank {planted} of {num_ranks}, {strategy}, fused {fused}"):
            args = (Plan(strategy=strategy, precision="fp16"), planted, fused)
            told = run_ranks(precision.scaled, num_ranks=num_ranks, args=args, timeout_seconds=_LIMIT_SECONDS)
            precision.check_scaled(told, planted=True)
    for strategy in STRATEGIES:
        for num_ranks in (2, 3, 4) if asked.long else (asked.chance.randint(2, 4),):
            with tally.trying(f"the loss of rank 1 of {num_ranks}, {strategy}"):
                args = (strategy,)
                told = run_ranks(
                    precision.overflowed_in_forward, num_ranks=num_ranks, args=args, timeout_seconds=_LIMIT_SECONDS
                )
                assert told == [(2.0**9, True)] * num_ranks, told
    for number, strategy in enumerate(STRATEGIES if asked.long else ("ddp", "fsdp")):
        with tally.trying(f"a sample of rank 1 of 2, {strategy}"):
            folder = asked.folder / strategy
            config = nonfinite.asked(folder, nonfinite="skip", clip_norm=float(number % 2), strategy=strategy)
            (_, told), (_, quiet) = run_ranks(
                nonfinite.ended, num_ranks=2, args=(config,), timeout_seconds=_LIMIT_SECONDS
            )
            assert len(told) == 1, told
            assert "NaN or Inf in step 7" in told[0], told
            assert "1 of 2 steps were skipped" in told[0], told
            assert quiet == []
            assert all(nonfinite.saved(folder).values()), "weights that are not finite were saved"
    return tally


ROWS = [
    Fault(
        name="14",
        shows="Inf or NaN on one rank, or in a shard that others do not have",
        must_be="all ranks skip, scales equal",
        run=one_ranks_overflow,
    )
]
