"""Rank 0 of 8 in rehearsal: steps of our engine and of torch's, in turn, on one GPU.

    python benchmarks/rehearsed_peers.py [--ranks 8] [--cases NAME …]

A job of one rank has no collectives, so its time leaves out the gathers and reduces that every larger job issues. Here
all rows of the program are issued, with the other ranks absent: ours writes the gathered bytes by a local copy,
`fully_shard` runs under torch's fake process group. Communication takes no time in either. `fsdp`, bf16, fused AdamW,
one batch that lies on the device. Each case runs in a process of its own, in which all ways are set up and blocks of
steps alternate. Writes benchmarks/results/rehearsed_peers_h200.json after every case.

    captured       ours as `shardwise train` runs it
    ordinary       ours with capture = "off": an ordinary loop
    fully_shard    torch's own, cut into the same units
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measuring
from hugging_face_peers import WARM_UP
from torch import Tensor
from training_case import Case, set_up

from shardwise.comm.absent import AbsentCollectives
from shardwise.engines import capture

_GPT_1_3B = Case(model="gpt-1.3b", batch=2, seq=2048)
CASES = {
    "Qwen3-0.6B 2×1024": Case(model="qwen3-0.6b", batch=2, seq=1024),
    "Gemma3-1B 2×1024": Case(model="gemma3-1b", batch=2, seq=1024),
    "BERT-large 16×256": Case(model="bert-large", batch=16, seq=256),
    "Llama-1B 2×2048": Case(model="llama-1b", batch=2, seq=2048),
    "Qwen3-0.6B 2×1024 compiled": Case(model="qwen3-0.6b", batch=2, seq=1024, compile="inductor"),
    "GPT-124M 4×1024": Case(model="gpt2-124m", batch=4, seq=1024),
    "GPT-124M 8×1024": Case(model="gpt2-124m", batch=8, seq=1024),
    "ViT-L 32": Case(model="vit-large", batch=32, image=224),
    "ViT-L 128": Case(model="vit-large", batch=128, image=224),
    "GPT-1.3B 2×2048": _GPT_1_3B,
    "GPT-1.3B 8×2048": replace(_GPT_1_3B, batch=8),
    "GPT-1.3B 4×2048 recompute": replace(_GPT_1_3B, batch=4, recompute="full"),
}
WAYS: dict[str, dict[str, str]] = {
    "captured": {"capture": "auto"},
    "ordinary": {},
    "fully_shard": {"engine": "torch", "capture": "off"},
}


def step_of(case: Case, *, collectives: AbsentCollectives | None, say: Callable[[str], None]) -> Callable[[], Tensor]:
    """Set a case up; return a function that trains one step and returns the loss."""
    own = collectives if case.engine == "shardwise" else None
    training = set_up(case, device="cuda", made_on="cuda", collectives=own)

    def step(*batch: Tensor) -> Tensor:
        loss = training.loss(*batch)
        loss.backward()
        training.update()
        return loss.detach()

    taken = capture(step, training.model, training.optimizer, tell=say) if case.is_captured else step
    return lambda: taken(*training.batch)


def measure(case: Case, *, blocks: int, collectives: AbsentCollectives | None) -> dict[str, Any]:
    """Measure all ways in turn."""
    said: list[str] = []
    steps, most, failed = {}, {}, {}
    for way, changes in WAYS.items():
        measuring.free()
        held = measuring.peaks()["allocated_bytes"]
        try:
            step = step_of(replace(case, **changes), collectives=collectives, say=said.append)
            for _ in range(WARM_UP):
                step()
        except Exception as error:
            failed[way] = measuring.one_line(error)
            continue
        steps[way], most[way] = step, measuring.peaks()["allocated_bytes"] - held
    seconds = measuring.in_turn(steps, blocks=blocks)
    return {
        "step_seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "block_seconds": seconds,
        "ratios": {
            f"{way} / fully_shard": measuring.median_ratio(seconds[way], seconds["fully_shard"])
            for way in ("captured", "ordinary")
            if way in seconds and "fully_shard" in seconds
        },
        "peak_bytes": most,
        "messages": said,
        "failed": failed,
    }


def main() -> None:
    out = measuring.RESULTS / "rehearsed_peers_h200.json"
    asked = measuring.options(__doc__, ranks=8, cases=list(CASES), blocks=5, out=out, here="")
    if asked.here:
        with measuring.job("cuda", num_ranks=asked.ranks) as collectives:
            case = replace(CASES[asked.here], num_ranks=asked.ranks)
            measuring.tell({"case": asked.here, **measure(case, blocks=asked.blocks, collectives=collectives)})
        return
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    for name in asked.cases:
        words = ("--here", name, "--ranks", str(asked.ranks), "--blocks", str(asked.blocks))
        try:
            (row,) = measuring.results_of(measuring.output_of(__file__, *words, limit_seconds=120))
        except measuring.ProcessFailed as error:
            print(error, flush=True)
            continue
        times = {way: f"{1e3 * seconds:.1f} ms" for way, seconds in row["step_seconds"].items()}
        print(name, times, row["ratios"], row["messages"], row["failed"], flush=True)
        rows = [one for one in rows if one["case"] != name] + [row]
        measuring.write(asked.out, {**measuring.circumstances(), "ranks": asked.ranks, "rows": rows})


if __name__ == "__main__":
    main()
