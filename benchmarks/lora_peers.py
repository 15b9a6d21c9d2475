"""Adapters on a frozen base under our engine and others, in turn, on one GPU: `python benchmarks/lora_peers.py`.

Llama-1B with random weights in bf16, rank-16 adapters of PEFT on all linear layers, 4 × 1024 tokens, bf16, fused AdamW,
one NCCL rank; with `--ranks 8 --engines default fsdp fully_shard`, rank 0 of 8 in rehearsal. Engines are those of
hugging_face_peers.py. Writes benchmarks/results/lora_peers_h200.json; `--tiny` runs a small model on the CPU.

    step_seconds   medians of blocks of steps, which alternate between the engines
    peak_bytes     the most that an engine had allocated, besides what those before it hold
"""

from functools import partial
from typing import Any

import torch
from hugging_face_models import TINY, make_model
from hugging_face_peers import measure
from measuring import RESULTS, circumstances, job, options, show_compared, write_part

_DEFAULTS = ("default", "default ddp", "default lean", "default ddp lean", "default ddp lean compiled")
ENGINES = (*_DEFAULTS, "fsdp", "ddp", "accelerate", "torch_ddp")
RANK = 16


def build(*, tiny: bool) -> tuple[Any, Any, Any]:
    """Return (model, tokens, a mask of ones)."""
    import peft

    torch.manual_seed(0)
    device = "cpu" if tiny else "cuda"
    base = make_model("llama-1b", device=device, **(TINY if tiny else {})).bfloat16()
    adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device(device):
        model = peft.get_peft_model(base, adapters).train()
        ids = torch.randint(5, base.config.vocab_size, (2, 8) if tiny else (4, 1024))
    return model, ids, torch.ones_like(ids)


def main() -> None:
    out = RESULTS / "lora_peers_h200.json"
    asked = options(__doc__, engines=ENGINES, blocks=7, ranks=1, tiny=False, out=out)
    with job("cpu" if asked.tiny else "cuda", num_ranks=asked.ranks) as collectives:
        build_model = partial(build, tiny=asked.tiny)
        row = measure(build_model, engines=asked.engines, blocks=asked.blocks, collectives=collectives)
    show_compared("llama-1b with adapters", row)
    part = "one_rank" if asked.ranks == 1 else f"rank_0_of_{asked.ranks}"
    write_part(None if asked.tiny else asked.out, part, {**circumstances(), "rows": [row]})


if __name__ == "__main__":
    main()
