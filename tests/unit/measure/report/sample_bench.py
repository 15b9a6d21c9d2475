"""A bench that nobody ran: the planner's own numbers in the place of measured ones, for pages and tables."""

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.hardware import cluster_of
from shardwise.measure.bench.case_result import CaseResult, PredictedCase, UnitOutline
from shardwise.measure.bench.results import Bench, Equivalence
from shardwise.measure.bench.spread import Spread
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.profile.memory_ledger import LedgerEntry, MemoryLedger
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.memory.peak import estimate, job_of
from shardwise.planner.memory.replay import row_peaks
from shardwise.planner.search.candidates import cost
from shardwise.planner.time.step_time import timeline
from shardwise.program import build

NUM_RANKS = 4
MICRO_BATCH = 2


def sample_bench(*, name: str = "gpt-tiny", num_ranks: int = NUM_RANKS) -> Bench:
    """gpt-tiny under every strategy of ours, and under torch's DDP and fully_shard."""
    cases = [sample_case("shardwise", strategy, num_ranks=num_ranks) for strategy in STRATEGIES]
    cases += [sample_case("torch", strategy, num_ranks=num_ranks) for strategy in ("ddp", "fsdp")]
    cases.append(CaseResult(engine="lightning", strategy="zero1", why_not="lightning has no zero1"))
    return Bench(
        name=name,
        command=f"shardwise bench {name}.toml --ranks {num_ranks} --out out",
        made="2026-01-02T03:04:05+00:00",
        num_ranks=num_ranks,
        step_samples=num_ranks * MICRO_BATCH,
        step_tokens=num_ranks * MICRO_BATCH * 64,
        settings={"task.model": "gpt-tiny", "task.seq": 64, "plan.micro_batch": MICRO_BATCH, "plan.precision": "fp32"},
        machine={"torch": "2.13.0", "device": "cpu", "num_ranks": num_ranks},
        cases=tuple(cases),
        equivalence=Equivalence(differences=(), largest=0.12),
        recommended=0,
        why="ddp is the fastest here. fsdp holds a third of it.",
        capacity_bytes=2**30,
        scaling=(),
    )


def sample_case(engine: str, strategy: str, *, num_ranks: int = NUM_RANKS) -> CaseResult:
    plan = Plan(strategy=strategy, engine=engine, micro_batch=MICRO_BATCH)
    spec = Model("gpt-tiny", seq=64).spec_for(plan)
    memory = estimate(spec, plan=plan, num_ranks=num_ranks, batch=MICRO_BATCH, optimizer="adamw-loop", device="cpu")
    job = job_of(spec, plan=plan, num_ranks=num_ranks, optimizer="adamw-loop", device="cpu").cut(2**62)
    found = row_peaks(job.memory_rows, at_rest=job.at_rest, batch=MICRO_BATCH)
    entries = tuple(LedgerEntry(at=label, num_bytes=parts) for label, parts in found)
    resting = {name: line.at(MICRO_BATCH) for name, line in zip(CATEGORIES, job.at_rest, strict=True)}
    ledger = MemoryLedger(entries=entries, at_rest=LedgerEntry(at="at rest", num_bytes=resting))
    program = build(spec, plan=plan)
    rows = {entry.at: number for number, entry in enumerate(entries)}
    happenings = [
        Happening(
            kind=operation.kind.value,
            subject=operation.subject,
            num_bytes=operation.num_bytes,
            seconds=number * 1e-3,
            row=rows.get(f"{row.trigger.value} {row.unit}", 0),
        )
        for number, (row, operation) in enumerate((row, one) for row in program.rows for one in row.operations)
    ]
    seconds = 0.05 + 0.01 * list(STRATEGIES).index(strategy) + 0.02 * (engine == "torch")
    cluster = cluster_of(f"{num_ranks}xh100-80gb")
    candidate = cost(spec, plan=plan, cluster=cluster, optimizer="adamw-loop", quick=True)
    spans = timeline(spec, plan=plan, cluster=cluster, optimizer="adamw-loop")
    return CaseResult(
        engine=engine,
        strategy=strategy,
        losses=tuple(5.5 - 0.1 * step for step in range(20)),
        grad_norms=(3.0, 2.5, 2.2),
        dtypes=dict.fromkeys(("compute", "master", "grads", "optim"), ("float32",)),
        step_seconds=Spread(values=(seconds, seconds * 1.1, seconds * 0.95)),
        silent_seconds=Spread(values=(seconds * 0.7,)),
        first_step_seconds=Spread(values=(3.0, 3.2)),
        allocated_bytes=tuple(memory.allocated_bytes + rank for rank in range(num_ranks)),
        ledgers=(ledger,) * num_ranks,
        sent_bytes=candidate.sent_bytes,
        calls={"all_gather": 8, "reduce_scatter": 4},
        units=tuple(_unit(unit) for unit in spec.units),
        buckets={bucket.name: bucket.units for bucket in program.buckets} if engine == "shardwise" else {},
        tape=tuple(happenings) if engine == "shardwise" else (),
        predicted=PredictedCase(
            allocated_bytes=memory.allocated_bytes,
            breakdown_bytes=dict(memory.breakdown_bytes),
            entries=tuple((entry.at, dict(entry.num_bytes)) for entry in entries),
            step_seconds=candidate.time.step_seconds,
            exposed_seconds=candidate.time.exposed_comm_seconds,
            spans=tuple(spans),
        ),
    )


def _unit(unit) -> UnitOutline:
    trained = sum(param.num_elements for param in unit.params if param.trainable)
    return UnitOutline(name=unit.name, num_params=unit.num_params, num_trained=trained)
