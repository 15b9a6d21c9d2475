"""Predicted step times and peaks compared with measured ones: our own on one H200, and what others published.

    python benchmarks/validate_time.py [--published DIR] [--rows] [--left-out]

Our own are in benchmarks/results/step_times_h200.json (step_times.py). DIR holds tables that others published
(docs/measured-planner.md says which, and how each row is read). Printed: errors by table and device, apart for rows
that constants may be fitted to and for those that are held out (published_rows.py); how many are inside the band that
`shardwise plan` would print; rank correlations; what is said not to fit. No GPU is needed; some models are traced.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from memory_predictions import source_as_measured
from published import MEASURED, measured, read
from published_rows import Row

from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.device import software_of
from shardwise.planner.search.candidates import Candidate, cost
from shardwise.planner.systems import system_of
from shardwise.planner.time.step_time import block_seconds
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec
from shardwise.program.spec.losses import with_loss

PAIR_DIFFERENCE = 0.05
# Tables to all of whose rows constants were fitted before the split: to MPT's the speed of kernels in 2023, to our own
# the H200's calibration and the engines' CPU time.
FITTED_BEFORE = {"MPT, FSDP", *(row.table for row in measured(MEASURED))}


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
    def band(self) -> float:
        return self.candidate.time_band.value

    @property
    def is_inside(self) -> bool:
        return abs(self.error) <= self.band

    @property
    def memory_error(self) -> float:
        """Of what is allocated: above 0 where the prediction is too large."""
        assert self.row.peak_bytes is not None
        return self.candidate.memory.allocated_bytes / self.row.peak_bytes - 1

    @property
    def device(self) -> str:
        return self.candidate.cluster.device.name


# Predicting


def spec_of(row: Row) -> ModelSpec:
    """Return the catalogue's spec; a longer MPT has more positions, which are parameters."""
    spec = source_as_measured(row.model, seq=row.length).spec_for(row.plan)
    spec = with_loss(spec, loss=row.loss, is_lean=False)
    if row.seq is None:
        return spec
    root = spec.unit(ROOT)
    longer = replace(root, params=tuple(_longer(param, spec.seq, row.seq) for param in root.params))
    return replace(spec, seq=row.seq, units=tuple(longer if unit.name == ROOT else unit for unit in spec.units))


def _longer(param: TensorSpec, before: int | None, after: int) -> TensorSpec:
    is_position = len(param.shape) == 2 and param.shape[0] == before
    return replace(param, shape=(after, param.shape[1])) if is_position else param


def cluster_for(row: Row) -> Cluster:
    """Return the row's cluster, with its software."""
    cluster = cluster_of(row.cluster)
    device = replace(cluster.device, software=software_of(row.software), matmul_precision=row.matmul)
    return replace(cluster, device=device)


def check(rows: Sequence[Row]) -> list[Checked]:
    seen: dict[tuple[object, ...], Candidate] = {}
    found = []
    for row in rows:
        key = (row.model, row.cluster, repr(row.plan), row.seq, row.length, row.software, row.matmul, row.loss)
        how = {"plan": row.plan, "cluster": cluster_for(row), "optimizer": row.optimizer}
        if key not in seen:
            seen[key] = cost(spec_of(row), **how, system=system_of(row.system))
        block = None if row.block_steps is None else block_seconds(spec_of(row), **how, num_steps=row.block_steps)
        found.append(Checked(row=row, candidate=seen[key], step_seconds=block))
    return found


# Judging


def timed(found: Sequence[Checked]) -> list[Checked]:
    return [one for one in found if one.row.per_s is not None]


def rank_correlation(found: Sequence[Checked]) -> float:
    """Spearman's: of the ranks of what was predicted and what was measured."""
    predicted = _ranks([one.predicted for one in found])
    measured = _ranks([one.row.per_s or 0.0 for one in found])
    return statistics.correlation(predicted, measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    first = {value: index for index, value in reversed(list(enumerate(sorted(values))))}
    counts = Counter(values)
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def pairs(found: Sequence[Checked]) -> Iterator[tuple[Checked, Checked]]:
    """Two strategies on the same model and cluster, with the same micro-batch, that differ by more than 5%."""
    for one, other in combinations(found, 2):
        if _trained(one) != _trained(other) or one.row.plan.strategy == other.row.plan.strategy:
            continue
        if abs((one.row.per_s or 0.0) / (other.row.per_s or 1.0) - 1) > PAIR_DIFFERENCE:
            yield one, other


def _trained(one: Checked) -> tuple[object, ...]:
    row = one.row
    return row.model, row.cluster, row.table, row.plan.micro_batch, row.plan.precision, row.plan.recompute, row.length


def nine_of_ten(errors: Sequence[float]) -> float:
    """Nine of ten are no larger."""
    return sorted(errors)[int(0.9 * (len(errors) - 1))]


def inside(found: Sequence[Checked]) -> str:
    return _share([one.is_inside for one in found])


def within(found: Sequence[Checked], *, error: float) -> str:
    """Say how many errors are at most this: a wide band has many rows inside, whatever they are worth."""
    return _share([abs(one.error) <= error for one in found])


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits)} of {len(hits)} ({sum(hits) / len(hits):.0%})"


# Printing


def errors_by_table(found: Sequence[Checked]) -> Iterator[str]:
    """Errors by table and device."""
    groups: dict[tuple[str, str], list[Checked]] = {}
    for one in timed(found):
        groups.setdefault((one.row.table, one.device), []).append(one)
    yield "| table | device | rows | held out | median error | of held out | nine of ten | worst | bias | inside band |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, device), group in groups.items():
        errors = [abs(one.error) for one in group]
        held = [abs(one.error) for one in group if one.row.is_held_out]
        held_median = f"{statistics.median(held):.1%}" if held else "–"
        bias = statistics.median(one.error for one in group)
        yield (
            f"| {name} | {device} | {len(group)} | {len(held)} | {statistics.median(errors):.1%} | {held_median} | "
            f"{nine_of_ten(errors):.1%} | {max(errors):.1%} | {bias:+.1%} | {inside(group)} |"
        )


def summary(found: Sequence[Checked]) -> Iterator[str]:
    """One line for each half, for held-out rows that no older constant was fitted to, and for all."""
    held = [one for one in timed(found) if one.row.is_held_out]
    halves = {
        "fitted": [one for one in timed(found) if not one.row.is_held_out],
        "held out": held,
        "never fitted to": [one for one in held if one.row.table not in FITTED_BEFORE],
        "all": timed(found),
    }
    yield "| rows | count | median error | nine of ten | inside their band | median band | within 10% |"
    yield "|---|---|---|---|---|---|---|"
    for name, half in halves.items():
        if not half:
            continue
        errors = [abs(one.error) for one in half]
        yield (
            f"| {name} | {len(half)} | {statistics.median(errors):.1%} | {nine_of_ten(errors):.1%} | {inside(half)} | "
            f"{statistics.median(one.band for one in half):.1%} | {within(half, error=0.1)} |"
        )


def correlations(found: Sequence[Checked]) -> dict[str, float]:
    """Table → rank correlation, of those with ten rows or more."""
    by_table: dict[str, list[Checked]] = {}
    for one in timed(found):
        by_table.setdefault(one.row.table, []).append(one)
    return {name: rank_correlation(group) for name, group in by_table.items() if len(group) >= 10}


def misfits(found: Sequence[Checked]) -> Iterator[str]:
    """What ran and is said not to fit, and the other way round."""
    for one in found:
        if one.row.ran and one.candidate.fits == "no":
            yield f"ran, and is said not to fit: {one.row}"
        if not one.row.ran and one.candidate.fits != "no":
            yield f"ran out of memory, and is said to fit: {one.row}"


def on_our_engine(found: Sequence[Checked]) -> tuple[int, list[str]]:
    """Of trainings that ran under fully_shard: how many, and which of them are said not to fit on our engine."""
    rows = {str(one.row): one.row for one in found if one.row.ran and one.row.plan.strategy == "fsdp"}
    rows = {name: row for name, row in rows.items() if row.plan.engine == "torch" and row.block_steps is None}
    wrong = []
    for name, row in rows.items():
        ours = replace(row, plan=replace(row.plan, engine="shardwise"))
        how = {"plan": ours.plan, "cluster": cluster_for(ours), "optimizer": row.optimizer}
        if cost(spec_of(ours), **how, quick=True).fits == "no":
            wrong.append(f"ran with fully_shard, and is said not to fit on our engine: {name}")
    return len(rows), wrong


def strategies(found: Sequence[Checked]) -> str:
    compared = list(pairs(timed(found)))
    right = sum((a.predicted > b.predicted) == ((a.row.per_s or 0) > (b.row.per_s or 0)) for a, b in compared)
    return f"{right} of {len(compared)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, help="the folder of published tables")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--left-out", action="store_true", help="print every row that is not predicted, and why")
    arguments = parser.parse_args()
    rows, left_out = list(measured(MEASURED)), []
    if arguments.published:
        published, left_out = read(arguments.published)
        rows += published
    found = check(rows)
    if arguments.rows:
        for one in timed(found):
            gib = one.candidate.memory.device_bytes / 2**30
            half = "held out" if one.row.is_held_out else "fitted"
            rates = f"{one.row.per_s:,.1f}, predicted {one.predicted:,.1f} ({one.error:+.1%}, band {one.band:.0%})"
            print(f"{half} {one.row}: {rates}, {gib:.0f} GiB: {one.candidate.fits}")
    if arguments.left_out:
        print("\n".join(f"left out: {one.table}, {one.what}: {one.reason}" for one in left_out))
    print("\n".join([*errors_by_table(found), "", *summary(found), "", *misfits(found)]))
    for name, value in correlations(found).items():
        print(f"{name}: rank correlation {value:.3f}")
    print(f"pairs of strategies that differ by more than 5%: {strategies(found)} in the right order")


if __name__ == "__main__":
    main()
