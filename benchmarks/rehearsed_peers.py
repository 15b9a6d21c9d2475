"""Rank 0 of 8 in rehearsal: steps of our engine and of torch's, in turn, on one GPU.

    python benchmarks/rehearsed_peers.py [--ranks 8] [--cases NAME …]

A job of one rank has no collectives, so its time leaves out the gathers and reduces that every larger job issues. Here
all rows of the program are issued, with the other ranks absent: ours writes the gathered bytes by a local copy,
`fully_shard` runs under torch's fake process group. Communication takes no time in either. `fsdp`, bf16, fused AdamW,
one batch that lies on the device. Each case runs in a process of its own, in which all ways are set up and blocks of
steps alternate. Writes benchmarks/results/rehearsed_peers_h200.json after every case.

    units          ours by default: units are CUDA graphs
    ordinary       ours with capture = "off"
    fully_shard    torch's own, cut into the same units
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import measuring
import workers
from hugging_face_peers import WARM_UP
from torch import Tensor
from training_case import Case, set_up

from shardwise.comm.job.absent import AbsentCollectives

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
    "units": {"capture": "auto"},
    "ordinary": {},
    "fully_shard": {"engine": "torch", "capture": "off"},
}


def measure(case: Case, *, blocks: int, collectives: AbsentCollectives | None) -> dict[str, Any]:
    """Measure all ways in turn."""

    def step_of(way: str) -> Callable[[], Tensor]:
        changed = replace(case, **WAYS[way])
        own = collectives if changed.engine == "shardwise" else None
        return set_up(changed, device="cuda", made_on="cuda", collectives=own).step

    makes = {way: partial(step_of, way) for way in WAYS}
    ratios = [(way, "fully_shard") for way in ("units", "ordinary")]
    return measuring.compared(makes, warm_up=WARM_UP, blocks=blocks, ratios=ratios)


def main() -> None:
    out = measuring.RESULTS / "rehearsed_peers_h200.json"
    asked = measuring.options(__doc__, ranks=8, cases=list(CASES), blocks=5, out=out, here="")
    if asked.here:
        with measuring.job("cuda", num_ranks=asked.ranks) as collectives:
            case = replace(CASES[asked.here], num_ranks=asked.ranks)
            workers.tell({"case": asked.here, **measure(case, blocks=asked.blocks, collectives=collectives)})
        return
    options = ("--ranks", str(asked.ranks), "--blocks", str(asked.blocks))
    for name, rows in workers.in_processes(__file__, asked.cases, *options, limit_seconds=120):
        measuring.show_compared(name, rows[0])
        measuring.replace_rows(asked.out, rows, key=lambda row: row["case"], ranks=asked.ranks)


if __name__ == "__main__":
    main()
