"""train.nonfinite: what follows on a NaN or Inf in a step.

    stop   the run ends before a checkpoint is written (default)
    skip   the optimizer leaves the step out, and a warning says so
    warn   a warning says so

Once they are read, the loss and the gradient norm are the same on every rank, so all ranks decide alike.
"""

import math
import warnings
from collections.abc import Callable, Sequence

from shardwise.errors import ShardwiseError
from shardwise.train.first_nonfinite import FirstNonFinite
from shardwise.train.metrics import StepMetrics


class NonFinite(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A loss or gradient norm that is NaN or Inf."""


def check_finite(
    steps: Sequence[StepMetrics],
    *,
    ranks_of: Callable[[int], Sequence[int]],
    found: FirstNonFinite | None,
    policy: str,
    scaled: bool,
    warns: bool,
) -> None:
    """Raise NonFinite, or warn on the rank that `warns`, at the first of `steps` that is not finite.

    ranks_of   step → the ranks whose own loss was not finite; collective, called only if there is such a step
    found      the source of the first such step, if it was looked for (first_nonfinite.py)
    scaled     with fp16 the scaler finds its scale by gradients that overflow: only the loss counts
    """
    bad = [step for step in steps if not _finite(step, scaled=scaled)]
    if not bad:
        return
    first = bad[0]
    ranks = tuple(ranks_of(first.step))
    where = f" on {_ranks(ranks)}" if ranks else ", with a finite loss on every rank"
    norm = "" if first.grad_norm is None else f", gradient norm {first.grad_norm:.4g}"
    source = _source(found if found is not None and found.step == first.step else None, ranks=ranks, scaled=scaled)
    what = f"step {first.step}: loss {first.loss:.4g}{norm}{where}, {source}"
    if policy == "stop":
        raise NonFinite(
            f"{what}; nothing was saved since: lower optimizer.lr or check the data, "
            "or set train.nonfinite to skip or warn"
        )
    if warns:
        skipped = [step for step in bad if step.grad_norm is not None and not math.isfinite(step.grad_norm)]
        did = f"; {len(skipped)} of {len(steps)} steps were skipped" if policy == "skip" and skipped else ""
        warnings.warn(f"NaN or Inf in {what}{did}", stacklevel=2)


def _source(found: FirstNonFinite | None, *, ranks: tuple[int, ...], scaled: bool) -> str:
    if found is None:
        # On a GPU a step is read after its update, when every weight may be NaN.
        return "in a module that is not known" + ("" if scaled else " (train.nonfinite = skip looks for it)")
    if found.place is None:
        return "but not when the step was run again"
    return f"first in {found.place}" + (f" on {_ranks(found.ranks)}" if found.ranks != ranks else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _finite(step: StepMetrics, *, scaled: bool) -> bool:
    norm = 0.0 if step.grad_norm is None or scaled else step.grad_norm
    return math.isfinite(step.loss) and math.isfinite(norm)
