"""An ordinary loop with units as CUDA graphs, on one GPU: `python benchmarks/unit_graphs.py`.

`loss = model(…).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()`, bf16, fused AdamW, one NCCL rank, with
batches that differ at every step. Each case runs in a process of its own, in which all contestants are set up, and
blocks of steps alternate between them. Writes benchmarks/results/unit_graphs_h200.json; rows of other cases are kept.

    units       ours by default: `fsdp`, units as graphs
    off         ours with capture = "off"
    torch_ddp   torch's DistributedDataParallel under autocast

A case is a model, and the lengths of its batches in turn. `new shapes` is the wall time of the first 50 steps, in which
16 lengths come up for the first time, in a new model each.

`--contestants units` runs one alone, whose memory does not mix with that of others. `--predict` prints what the planner
says of `units` in the first cases, without a GPU; of several lengths, memory with graphs and without.

    reserved_bytes   the most that the allocator reserved during warm-up and later, without what others hold
    device_bytes     what the device had in use besides what others hold, with the driver's data of graphs; the first
                     contestant's includes the libraries that all use
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import measuring
import torch
import workers
from hugging_face_models import MODELS, make_model
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.engine.engine import engine_of, is_prepared
from shardwise.engine.torch_engine.prepare import prepare_on_torch
from shardwise.hardware import cluster_of
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import Task
from shardwise.planner.memory.peak import estimate
from shardwise.planner.time.step_time import estimate_time
from shardwise.planner.ways import traced_ways

Batch = dict[str, Tensor]
# Rounds of all lengths: six ordinary passes of each, an observed one and a recorded one come first.
_WARM_UP = 10
_NEW_STEPS, _NEW_SHAPES = 50, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    lengths: tuple[int, ...]
    contestants: tuple[str, ...]
    samples: int = 2


_FIXED = ("off", "units")
# Of one length, and of models that read tokens alone.
_PREDICTED = (
    "qwen3-0.6b",
    "smollm2-360m",
    "bert-large",
    "llama-1b",
    "qwen3-0.6b, 4 lengths",
    "smollm2-360m, 4 lengths",
)
_VARYING = ("off", "units", "torch_ddp")
CASES = {
    "qwen3-0.6b": Case(model="qwen3-0.6b", lengths=(1024,), contestants=_FIXED),
    "smollm2-360m": Case(model="smollm2-360m", lengths=(1024,), contestants=_FIXED),
    "bert-large": Case(model="bert-large", lengths=(256,), contestants=_FIXED, samples=16),
    "llama-1b": Case(model="llama-1b", lengths=(2048,), contestants=_FIXED),
    "qwen3-0.6b, 4 lengths": Case(model="qwen3-0.6b", lengths=(1024, 768, 512, 256), contestants=_VARYING),
    "smollm2-360m, 4 lengths": Case(model="smollm2-360m", lengths=(1024, 768, 512, 256), contestants=_VARYING),
    "whisper-small": Case(model="whisper-small", lengths=(128,), contestants=_FIXED, samples=4),
    "deberta-v3-large": Case(model="deberta-v3-large", lengths=(256,), contestants=_FIXED, samples=8),
    "new shapes": Case(model="smollm2-360m", lengths=tuple(range(64, 1025, 64)), contestants=("units", "off")),
}


def make(name: str, *, device: str = "cuda") -> nn.Module:
    """Build a model in fp32, with random weights."""
    import transformers

    torch.manual_seed(0)
    if name in MODELS:
        return make_model(name, device=device)
    config: Any
    if name == "smollm2-360m":
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15,
            num_key_value_heads=5, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        kind: Any = transformers.LlamaForCausalLM
    elif name == "whisper-small":
        config = transformers.WhisperConfig(
            vocab_size=51865, d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
            decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
        )  # fmt: skip
        kind = transformers.WhisperForConditionalGeneration
    else:
        config = transformers.DebertaV2Config(
            vocab_size=128100, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
            pos_att_type=["p2c", "c2p"], max_relative_positions=-1, position_biased_input=False, type_vocab_size=0,
        )  # fmt: skip
        kind = transformers.DebertaV2ForSequenceClassification
    with torch.device(device):
        model: nn.Module = kind(config)
    return model.float().train()


def batches(case: Case) -> Iterator[Batch]:
    """Yield batches of the lengths in turn, each with tokens of its own."""
    generator = torch.Generator("cuda").manual_seed(1)
    for length in cycle(case.lengths):
        ids = torch.randint(5, 30000, (case.samples, length), device="cuda", generator=generator)
        if case.model == "whisper-small":
            features = torch.randn(case.samples, 80, 3000, device="cuda", generator=generator)
            yield {"input_features": features, "labels": ids}
        elif case.model == "deberta-v3-large":
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
        else:
            yield {"input_ids": ids, "labels": ids}


class Contestant:
    """A model, prepared, and its step; `wrapped`: what is called, which may be torch's DDP around it."""

    def __init__(self, name: str, case: Case) -> None:
        self.model = make(case.model)
        optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        wrapped: nn.Module = self.model
        if name == "torch_ddp":
            plan = Plan(strategy="ddp", precision="bf16", engine="torch", capture="off")
            wrapped, optimizer = prepare_on_torch(self.model, optimizer, plan)
        else:
            plan = Plan(strategy="fsdp", precision="bf16", capture="off" if name == "off" else "auto")
            shardwise.prepare(self.model, optimizer, plan)

        def step(**batch: Tensor) -> Tensor:
            loss: Tensor = wrapped(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self._batches = batches(case)
        self._step = step

    def __call__(self) -> Tensor:
        return self._step(**next(self._batches))

    def replayed_share(self) -> float:
        graphs = engine_of(self.model).graphs if is_prepared(self.model) else None
        return graphs.num_replayed / max(graphs.num_calls, 1) if graphs is not None else 0.0


def measure(case: Case, *, blocks: int) -> dict[str, Any]:
    """Set up all contestants, one after the other, and measure blocks of steps in turn."""
    contestants: dict[str, Contestant] = {}
    reserved, device, losses = {}, {}, {}
    for name in case.contestants:
        measuring.free()
        held, used = torch.cuda.memory_reserved(), measuring.used_bytes()
        contestant = contestants[name] = Contestant(name, case)
        losses[name] = [contestant().item() for _ in range(_WARM_UP * len(case.lengths))]
        measuring.settle()
        reserved[name], device[name] = torch.cuda.max_memory_reserved() - held, measuring.used_bytes() - used
    rounds = {name: lambda one=one: [one() for _ in case.lengths] for name, one in contestants.items()}
    before = {name: one.replayed_share() for name, one in contestants.items()}
    seconds = measuring.in_turn(rounds, blocks=blocks)
    seconds = {name: [value / len(case.lengths) for value in times] for name, times in seconds.items()}
    pairs = [(one, other) for one in ("units",) for other in case.contestants if other != one]
    return {
        "step_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "block_seconds": seconds,
        "ratios": {f"{other} / {one}": measuring.median_ratio(seconds[other], seconds[one]) for one, other in pairs},
        "reserved_bytes": reserved,
        "device_bytes": device,
        "replayed_share": {name: (before[name], one.replayed_share()) for name, one in contestants.items()},
        "last_losses": {name: found[-1] for name, found in losses.items()},
    }


def measure_new_shapes(case: Case, *, blocks: int) -> dict[str, Any]:
    """Measure the first steps of a new model, in which every length is new at first."""
    order = random.Random(0).choices(case.lengths, k=_NEW_STEPS - _NEW_SHAPES)
    case = Case(model=case.model, lengths=(*case.lengths, *order), contestants=case.contestants)
    seconds: dict[str, list[float]] = {name: [] for name in case.contestants}
    for _ in range(blocks):
        for name in case.contestants:
            measuring.free()
            contestant = Contestant(name, case)
            measuring.settle()
            began = time.perf_counter()
            for _ in range(_NEW_STEPS):
                contestant()
            measuring.settle()
            seconds[name].append(time.perf_counter() - began)
            del contestant
    # The first of each includes the start of libraries.
    kept = {name: times[1:] for name, times in seconds.items()}
    return {
        "wall_seconds": {name: statistics.median(times) for name, times in kept.items()},
        "block_seconds": seconds,
        "ratios": {"units / off": measuring.median_ratio(kept["units"], kept["off"])},
    }


def predict(name: str, case: Case) -> None:
    """Print the planner's time and memory of a loop whose units are CUDA graphs; of several lengths, its memory."""

    def make_batch(size: int) -> Batch:
        ids = torch.randint(5, 30000, (size, case.lengths[0]), device="meta")
        return {"input_ids": ids, "labels": ids}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    task = Task(model=make(case.model, device="meta"), loss=loss, make_batch=make_batch)
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=case.samples)
    ways = traced_ways(trace_task(task, name=name, ways=[]), plan=plan)
    spec = trace_task(task, name=name, ways=[(plan.precision, way) for way in ways])
    if len(case.lengths) > 1:
        spec = replace(spec, lengths=case.lengths)
        for as_graphs in (True, False):
            memory = estimate(
                spec, plan=plan, num_ranks=1, batch=case.samples, made_on_device=True, as_graphs=as_graphs
            )
            measuring.show(f"{name}, {'units' if as_graphs else 'off'}", {"reserved_bytes": memory.reserved_bytes})
        return
    memory = estimate(spec, plan=plan, num_ranks=1, batch=case.samples, as_graphs=True)
    time = estimate_time(spec, plan=plan, cluster=cluster_of("1xh200"), optimizer="adamw-fused", as_graphs=True)
    assert time is not None
    measuring.show(name, {"step_seconds": time.step_seconds, "reserved_bytes": memory.reserved_bytes})


def main() -> None:
    out = measuring.RESULTS / "unit_graphs_h200.json"
    asked = measuring.options(__doc__, cases=list(CASES), contestants=[], blocks=5, predict=False, out=out, here="")
    if asked.predict:
        for name in asked.cases:
            if name in _PREDICTED:
                predict(name, CASES[name])
        return
    if asked.here:
        case = CASES[asked.here]
        alone = f", {' and '.join(asked.contestants)} alone" if asked.contestants else ""
        case = replace(case, contestants=tuple(asked.contestants) or case.contestants)
        with measuring.job("cuda"):
            found = (measure_new_shapes if asked.here == "new shapes" else measure)(case, blocks=asked.blocks)
        workers.tell({"case": asked.here + alone, **found})
        return
    options = ["--blocks", str(asked.blocks), *(["--contestants", *asked.contestants] if asked.contestants else [])]
    for name, rows in workers.in_processes(__file__, asked.cases, *options, limit_seconds=150):
        for row in rows:
            print(name, {key: value for key, value in row.items() if key != "block_seconds"}, flush=True)
        measuring.replace_rows(asked.out, rows, key=lambda row: row["case"])


if __name__ == "__main__":
    main()
