"""Predicted step times beside measured ones: our own on one H200, and what others published.

    python benchmarks/validate_time.py [--published DIR] [--rows]

Our own are in benchmarks/results/step_times_h200.json (step_times.py). DIR holds tables that others published
(docs/planner.md says which, and how each row is read). Printed: the median and worst error by table and device, the
rank correlation, and what ran although it is said not to fit. No GPU is needed; one model is traced, with torch.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from published import MEASURED, measured, read
from published_rows import Row

from shardwise.hardware import Cluster, cluster_of, device_of
from shardwise.planner.search.candidates import Candidate, cost
from shardwise.planner.time.step_time import FITTED_DEVICES, block_seconds, time_band
from shardwise.sources import Source
from shardwise.spec import ROOT, ModelSpec, TensorSpec

PAIR_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    row: Row
    candidate: Candidate
    # Of a step among as many as were measured in one go; None: of any.
    step_seconds: float | None = None

    @property
    def predicted(self) -> float:
        time = self.candidate.time
        assert time is not None
        if self.step_seconds is not None:
            return self.candidate.batch / self.step_seconds
        return time.samples_per_s if self.row.seq is None else time.tokens_per_s_per_gpu or 0.0

    @property
    def error(self) -> float:
        """Of the time: above 0 where the prediction is too slow."""
        assert self.row.per_s is not None
        return self.row.per_s / self.predicted - 1

    @property
    def device(self) -> str:
        return self.candidate.cluster.device.name


# Predicting


def spec_of(row: Row, sources: dict[str, Source]) -> ModelSpec:
    """The catalogue's spec; a longer MPT has more positions, which are parameters."""
    source = sources.setdefault(f"{row.model} {row.length}", Source(row.model, seq=row.length))
    spec = source.spec_for(row.plan)
    if row.seq is None:
        return spec
    longer = replace(
        spec.unit(ROOT), params=tuple(_longer(param, spec.seq, row.seq) for param in spec.unit(ROOT).params)
    )
    return replace(
        spec,
        seq=row.seq,
        units=tuple(longer if unit.name == ROOT else unit for unit in spec.units),
    )


def _longer(param: TensorSpec, before: int | None, after: int) -> TensorSpec:
    is_position = len(param.shape) == 2 and param.shape[0] == before
    return replace(param, shape=(after, param.shape[1])) if is_position else param


def cluster_for(row: Row) -> Cluster:
    """The row's cluster, with its software."""
    cluster = cluster_of(row.cluster)
    device = replace(cluster.device, software=row.software, matmul_precision=row.matmul)
    return replace(cluster, device=device)


def check(rows: Sequence[Row]) -> list[Checked]:
    sources: dict[str, Source] = {}
    seen: dict[tuple[object, ...], Candidate] = {}
    found = []
    for row in rows:
        key = (row.model, row.cluster, repr(row.plan), row.seq, row.length, row.software, row.matmul)
        if key not in seen:
            seen[key] = cost(spec_of(row, sources), plan=row.plan, cluster=cluster_for(row), optimizer=row.optimizer)
        found.append(Checked(row=row, candidate=seen[key], step_seconds=_block(row, sources)))
    return found


def _block(row: Row, sources: dict[str, Source]) -> float | None:
    if row.block_steps is None:
        return None
    cluster, spec = cluster_for(row), spec_of(row, sources)
    return block_seconds(spec, plan=row.plan, cluster=cluster, num_steps=row.block_steps, optimizer=row.optimizer)


# Judging


def rank_correlation(found: Sequence[Checked]) -> float:
    """Spearman's: of the ranks of what was predicted and what was measured."""
    predicted, measured = (_ranks([of(one) for one in found]) for of in (lambda c: c.predicted, lambda c: c.row.per_s))
    return statistics.correlation(predicted, measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    counts = Counter(values)
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def pairs(found: Sequence[Checked]) -> Iterator[tuple[Checked, Checked]]:
    """Two strategies on the same model and cluster that differ by more than 5%."""
    for one, other in combinations(found, 2):
        same = (one.row.model, one.row.cluster, one.row.table) == (other.row.model, other.row.cluster, other.row.table)
        differ = abs(one.row.per_s / other.row.per_s - 1) > PAIR_DIFFERENCE
        if same and differ and one.row.plan.strategy != other.row.plan.strategy:
            yield one, other


def report(found: Sequence[Checked]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Checked]] = {}
    for one in found:
        groups.setdefault((one.row.table, one.device), []).append(one)
    yield "| table | device | rows | fitted | median error | 90% within | worst | bias | said not to fit |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (table, device), group in groups.items():
        errors = sorted(abs(one.error) for one in group)
        no = sum(one.candidate.fits == "no" for one in group)
        fitted = "yes" if device in FITTED_DEVICES else "no"
        bias = statistics.median(one.error for one in group)
        yield (
            f"| {table} | {device} | {len(group)} | {fitted} | {statistics.median(errors):.1%} | "
            f"{_ninth(errors):.1%} | {errors[-1]:.1%} | {bias:+.1%} | {no} |"
        )
    yield ""
    for is_fitted, kinds in ((True, "kinds of device that were fitted to"), (False, "others")):
        errors = sorted(abs(one.error) for one in found if (one.device in FITTED_DEVICES) == is_fitted)
        if errors:
            band = time_band(device_of(FITTED_DEVICES[0] if is_fitted else "l4"))
            yield (
                f"{kinds}: median {statistics.median(errors):.1%}, nine of ten within {_ninth(errors):.1%} "
                f"(the band that `shardwise plan` prints: {band:.0%})"
            )
    for table in dict.fromkeys(one.row.table for one in found):
        group = [one for one in found if one.row.table == table]
        yield f"{table}: rank correlation {rank_correlation(group):.3f}"
    compared = list(pairs(found))
    right = sum((a.predicted > b.predicted) == (a.row.per_s > b.row.per_s) for a, b in compared)
    if compared:
        yield f"pairs of strategies that differ by more than 5%: {right} of {len(compared)} right"


def _ninth(errors: Sequence[float]) -> float:
    """Nine of ten are no larger."""
    return errors[int(0.9 * (len(errors) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, help="the folder of published tables")
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    rows = list(measured(MEASURED))
    if arguments.published:
        rows += read(arguments.published)[0]
    found = check([row for row in rows if row.per_s is not None])
    if arguments.rows:
        for one in found:
            gib = one.candidate.memory.device_bytes / 2**30
            rates = f"{one.row.per_s:,.1f}, predicted {one.predicted:,.1f} ({one.error:+.1%})"
            print(f"{one.row}: {rates}, {gib:.0f} GiB: {one.candidate.fits}")
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
