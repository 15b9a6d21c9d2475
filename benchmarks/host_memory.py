"""Models that need host memory, on one GPU: `python benchmarks/host_memory.py [--cases NAME …]`.

Full fine-tuning by fused AdamW with fp32 masters, bf16 compute and recomputed blocks, with the device limited to a part
of its memory. Each way runs in a process of its own (`--together`: all ways of a case in one, which is quicker); the
ways of a case alternate (`--rounds`). A step's time is that from its end to the next one's on the device, which is not
waited for in between: updates overlap the next forward, as in training. Writes
benchmarks/results/host_memory_h200.json after every case; rows of other cases are kept. `--predict` adds what the
planner says to all of its rows, without a GPU. `--choose` only has the planner choose its plans, which a later run then
takes. `--again` takes the plans with which the rows were measured, also where the planner would now choose others.

    auto                the plan that the planner chooses for the limit
    auto backward       the same, with updates inside backward
    auto either         the same, with updates where the planner says they are faster
    host N              ours, with the states of N % of the blocks in host memory
    host N activations  the same, and what blocks save for backward
    host N backward     the same as `host N`, with updates inside backward; also `host N activations backward`
    cpu N               the same as `host N`, updated by the CPU
    full depth          for a model of fewer blocks: what the planner chooses for all of them, each as the last one
    all on host         ours, with all states and all that blocks save in host memory, nothing recomputed
    fsdp2               torch's fully_shard with CPUOffloadPolicy, fused AdamW on the CPU
    deepspeed R         DeepSpeed ZeRO-3 with the optimizer offloaded by the ratio R, where it can be built
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import measuring
import torch
import workers
from memory_predictions import AS_MEASURED
from torch import Tensor, nn
from training_case import make_optimizer

import shardwise
from shardwise import Plan
from shardwise.engine.offload.pinned import pinned_bytes
from shardwise.engine.prepared.inventory import held_bytes
from shardwise.hardware import cluster_of
from shardwise.models.adapted import adapt
from shardwise.models.reference import Model
from shardwise.models.specs.spec_request import Adaptation
from shardwise.models.tasks import Task, load_task
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, cost
from shardwise.planner.search.request import AutoRequest
from shardwise.program.spec import ROOT
from shardwise.program.units import unit_modules

# Of 125 GiB.
HOST_BYTES = 110 * 2**30
PLANS = Path(__file__).parent / ".host_memory_plans.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`limit_gib`: device memory that may be used; `share`: the part of what ddp needs. None: all of it.

    `lora`: the rank of adapters on all linear layers of the blocks; None: full fine-tuning. `of`: the model of which
    this one has the first blocks.
    """

    model: str
    batch: int = 1
    seq: int = 4096
    limit_gib: float | None = None
    share: float | None = None
    warm_up: int = 2
    num_steps: int = 4
    lora: int | None = None
    ways: tuple[str, ...] = ("auto",)
    of: str | None = None

    @property
    def adaptation(self) -> Adaptation | None:
        return None if self.lora is None else Adaptation(rank=self.lora)

    @property
    def source(self) -> Model:
        return Model(self.model, seq=self.seq, adaptation=self.adaptation)

    def task(self) -> Task:
        """Return the task, with the model on the meta device."""
        task = load_task(self.model, seq=self.seq, device="meta")
        if self.adaptation is not None:
            adapt(task.model, self.adaptation, name=self.model)
        return task


_GRID = tuple(f"host {share}{more}" for share in (0, 25, 50, 100) for more in ("", " activations"))
# A step takes a minute or two.
_LONG: dict[str, Any] = {"warm_up": 0, "num_steps": 2}
_BUDGETS = ("auto", "auto either", "host 0", "host 100 activations")
_UPDATES = {"auto": "step", "auto backward": "backward", "auto either": "auto"}
CASES = {
    "Qwen3-4B in 24 GiB": Case(
        model="qwen3-4b", limit_gib=24, ways=("auto", "auto backward", "fsdp2", "deepspeed 1.0")
    ),
    "Qwen3-4B in 40 GiB": Case(model="qwen3-4b", limit_gib=40, ways=("auto", "auto backward", "deepspeed 0.6")),
    "Llama-8B in 80 GiB": Case(model="llama-3.1-8b", limit_gib=80, ways=("auto", "auto backward")),
    "Qwen3-14B": Case(model="qwen3-14b", num_steps=3, ways=("auto backward",)),
    "SmolLM2-135M, 524,288 tokens": Case(model="smollm2-135m", seq=524288, **_LONG),
    "Qwen3-0.6B, 262,144 tokens": Case(model="qwen3-0.6b", seq=262144, **_LONG),
    "Llama-8B with LoRA, 131,072 tokens": Case(model="llama-3.1-8b", seq=131072, lora=16, **_LONG),
    "SmolLM2-135M of 1 block, 4,194,304 tokens": Case(
        model=f"python:{Path(__file__).with_name('truncated.py')}:smollm2_135m_of_1_block",
        of="smollm2-135m",
        seq=4194304,
        warm_up=0,
        num_steps=1,
        ways=("full depth",),
    ),
    "Llama-1B grid": Case(model="llama-3.2-1b", ways=_GRID),
    "Qwen3-1.7B grid": Case(model="qwen3-1.7b", ways=_GRID),
    **{
        f"{title} in {share:.0%}": Case(model=model, batch=4, share=share, ways=_BUDGETS)
        for title, model in (("SmolLM2-1.7B", "smollm2-1.7b"), ("Llama-3B", "llama-3.2-3b"))
        for share in (0.25, 0.4, 0.6)
    },
    "tiny": Case(model="llama-tiny", seq=64, ways=("host 50", "cpu 100", "auto backward", "fsdp2")),
}


def plan_of(case: Case, way: str) -> Plan:
    """Return the plan of one of our ways."""
    stored = stored_plans().get(f"{name_of(case)}, {way}")
    if stored is not None:
        return Plan.from_dict(stored)
    if way.startswith("auto"):
        return chosen_plan(case, update=_UPDATES[way])
    if way == "full depth":
        assert case.of is not None
        plan = chosen_plan(replace(case, model=case.of), update="step")
        return replace(
            plan,
            overrides={},
            recompute_overrides={},
            offload_states=bool(plan.offload_states),
            offload_activations=bool(plan.offload_activations),
        )
    if way == "all on host":
        return Plan(strategy="fsdp", precision="bf16", capture="off", offload_states=True, offload_activations=True)
    kind, share, *more = way.split()
    units = [name for name in unit_modules(case.task().model) if name != ROOT]
    # The last ones: their updates have the longest time until they are gathered.
    num_on_host = round(int(share) / 100 * len(units))
    return Plan(
        strategy="fsdp",
        precision="bf16",
        recompute="full",
        capture="off",
        offload_states=True if share == "100" else tuple(units[len(units) - num_on_host :]),
        offload_activations="activations" in more,
        offload_update="host" if kind == "cpu" else "device",
        update="backward" if "backward" in more else "step",
    )


def name_of(case: Case) -> str:
    return next(name for name, one in CASES.items() if one == case)


@cache
def stored_plans() -> dict[str, Any]:
    """Return the plans that `--choose` has found, by case and way, and the limit of each case."""
    return dict(json.loads(PLANS.read_text())) if PLANS.exists() else {}


def store_plans(found: dict[str, Any]) -> None:
    known = json.loads(PLANS.read_text()) if PLANS.exists() else {}
    PLANS.write_text(json.dumps(known | found))


def choose(names: list[str], *, ways: list[str]) -> None:
    """Have the planner choose, and keep its plans for a machine whose time is short. Needs no GPU."""
    for name in names:
        for way in ways or CASES[name].ways:
            if way.startswith("auto") or way == "full depth":
                plan = plan_of(CASES[name], way)
                store_plans({f"{name}, {way}": plan.to_dict(), f"{name}, limit": limit_bytes(CASES[name])})
                print(f"{name}, {way}: {plan}", flush=True)


def take_measured(path: Path, *, names: list[str]) -> None:
    """Keep the plans with which the rows of these cases were measured."""
    rows = json.loads(path.read_text())["rows"]
    store_plans({f"{row['case']}, {row['way']}": row["plan"] for row in rows if row["case"] in names and "plan" in row})


@cache
def limit_bytes(case: Case) -> int | None:
    """Return the device memory that may be used; None: all of it."""
    if case.share is not None:
        known = stored_plans().get(f"{name_of(case)}, limit")
        if known is not None:
            return int(known)
        plan = Plan(strategy="ddp", precision="bf16", micro_batch=case.batch, capture="off")
        return round(case.share * _cost(case, plan).memory.device_bytes)
    return None if case.limit_gib is None else round(case.limit_gib * 2**30)


@cache
def chosen_plan(case: Case, *, update: str) -> Plan:
    """Return what the planner chooses within the limit, and within most of the host's memory."""
    request = AutoRequest(
        plan=Plan(precision="bf16", strategy="auto", micro_batch=case.batch, update=update, capture="off"),
        cluster=replace(cluster_of("1xh200"), host_bytes=HOST_BYTES),
        optimizer="adamw-fused",
        budget_bytes=limit_bytes(case),
    )
    return solve_plan(case.source.spec_for, request=request).candidate.plan


def step_of(case: Case, way: str, *, device: str) -> tuple[Callable[[], Tensor], Any, Any]:
    """Set up one way; return its step, and the prepared model and optimizer if they are ours."""
    torch.manual_seed(0)
    task = case.task()
    batch = tuple(torch.randint(200, one.shape, device=device) for one in task.make_batch(case.batch))
    model, ours = task.model.train(), _is_ours(way)
    if way.startswith("deepspeed"):
        return deepspeed_step(task, batch, ratio=float(way.split()[1])), None, None
    if ours:
        optimizer = make_optimizer("adamw-fused", model)
        shardwise.prepare(model, optimizer, plan_of(case, way), device=device)
    else:
        shard_by_torch(model, device=device)
        optimizer = make_optimizer("adamw-fused", model)

    def step() -> Tensor:
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, *((model, optimizer) if ours else (None, None))


def fill(model: nn.Module) -> None:
    """Give a model on the meta device memory on the host, and any values."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.01)


def recompute_blocks(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    blocks = [module for name, module in unit_modules(model).items() if name != ROOT]
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is block for block in blocks))


def shard_by_torch(model: nn.Module, *, device: str) -> None:
    """The same units by fully_shard, with parameters, gradients and optimizer state in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    fill(model)
    for buffer in model.buffers():
        buffer.zero_()
    recompute_blocks(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device != "cpu")
    for name, module in unit_modules(model).items():
        if name != ROOT:
            fully_shard(module, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)


def deepspeed_step(task: Task, batch: tuple[Tensor, ...], *, ratio: float) -> Callable[[], Tensor]:
    """ZeRO-3 as its documentation sets it up for one GPU: optimizer in pinned host memory, its part `ratio`."""
    import deepspeed

    fill(task.model)
    recompute_blocks(task.model)
    pinned = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": batch[0].shape[0],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**pinned, "ratio": ratio},
            "offload_param": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    engine, *_ = deepspeed.initialize(model=task.model, config=settings)

    def step() -> Tensor:
        loss = task.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def predicted(case: Case, plan: Plan) -> dict[str, Any]:
    """Return what the planner says of a plan that ran."""
    found = _cost(case, replace(plan, micro_batch=case.batch))
    assert found.time is not None
    return {
        "step_seconds": found.time.step_seconds,
        "allocated_bytes": found.memory.allocated_bytes,
        "host_bytes": found.memory.host_bytes,
    }


def _cost(case: Case, plan: Plan) -> Candidate:
    return cost(case.source.spec_for(plan), plan=plan, cluster=cluster_of("1xh200"), optimizer="adamw-fused")


def predict(path: Path) -> None:
    """Write the planner's answers into all rows of a file. Needs no GPU."""
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        if "plan" not in row:
            continue
        row["predicted"] = says = predicted(CASES[row["case"]], Plan.from_dict(AS_MEASURED | row["plan"]))
        off = {name: says[name] / row["measured"][name] - 1 for name in says if row["measured"].get(name)}
        print(
            f"{row['case']}, {row['way']}: {', '.join(f'{name} {part:+.1%}' for name, part in off.items())}", flush=True
        )
    measuring.write_part(path, "rows", rows)


def _is_ours(way: str) -> bool:
    return way.split()[0] not in ("fsdp2", "deepspeed")


def measure(case: Case, way: str, *, device: str) -> dict[str, Any]:
    """Run the steps of one way; return times and peaks."""
    limit = limit_bytes(case)
    if limit is not None and device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    with measuring.job(device):
        began = time.perf_counter()
        step, model, optimizer = step_of(case, way, device=device)
        prepared_seconds = time.perf_counter() - began
        losses, ends = [], [_now(device)]
        for number in range(case.warm_up + case.num_steps):
            if number == case.warm_up and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            losses.append(step())
            ends.append(_now(device))
        measuring.settle()
        seconds = [_between(*pair) for pair in pairwise(ends)]
        row: dict[str, Any] = {
            "prepared_seconds": prepared_seconds,
            "step_seconds": statistics.median(seconds[case.warm_up :]),
            "all_seconds": seconds,
            "losses": [loss.item() for loss in losses],
            **(measuring.peaks() if device == "cuda" else {}),
        }
        if model is not None:
            row["host_bytes"] = pinned_bytes() if device == "cuda" else held_bytes(model, optimizer)["host"]
        return row


def _now(device: str) -> Any:
    """Return this moment: on a GPU, when it has computed all that was issued so far."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(earlier: Any, later: Any) -> float:
    return later - earlier if isinstance(later, float) else earlier.elapsed_time(later) / 1e3


def here(name: str) -> None:
    case_name, *ways = name.split("|")
    case, device = CASES[case_name], "cuda" if torch.cuda.is_available() else "cpu"
    for way in ways:
        measuring.free()
        try:
            row = measure(case, way, device=device)
        except torch.OutOfMemoryError as error:
            print(f"{name}: {measuring.one_line(error)}", file=sys.stderr)
            continue
        plan = {"plan": plan_of(case, way).to_dict()} if _is_ours(way) else {}
        workers.tell({"case": case_name, "way": way, **plan, "measured": row})


def main() -> None:
    given = measuring.options(
        __doc__,
        cases=list(CASES)[:4],
        ways=[],
        rounds=1,
        together=False,
        predict=False,
        choose=False,
        again=False,
        here="",
        out=None,
    )
    if given.here:
        here(given.here)
        return
    out = given.out or measuring.RESULTS / "host_memory_h200.json"
    if given.predict:
        predict(out)
        return
    if given.choose:
        choose(given.cases, ways=given.ways)
        return
    if given.again:
        take_measured(measuring.RESULTS / "host_memory_h200.json", names=given.cases)
    if stored_plans():
        print(f"plans of {PLANS.name}, from --choose or --again; delete it for new ones", flush=True)
    ways = {case: given.ways or CASES[case].ways for case in given.cases}
    names = [
        f"{case}|{way}"
        for _ in range(given.rounds)
        for case in given.cases
        for way in (["|".join(ways[case])] if given.together else ways[case])
    ]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for _, rows in workers.in_processes(__file__, names, limit_seconds=400):
        for row in rows:
            key = (row["case"], row["way"])
            again = found.setdefault(key, row)
            if again is not row:
                warm_up = CASES[row["case"]].warm_up
                again["measured"]["all_seconds"] += row["measured"]["all_seconds"][warm_up:]
                again["measured"]["step_seconds"] = statistics.median(again["measured"]["all_seconds"][warm_up:])
            measuring.show(f"{row['case']}, {row['way']}", {**row["measured"], "losses": None, "all_seconds": None})
            measuring.replace_rows(out, [again], key=lambda one: (one["case"], one["way"]))


if __name__ == "__main__":
    main()
