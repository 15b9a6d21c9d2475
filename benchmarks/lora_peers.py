"""Adapters on a frozen base under our engine and others, in turn, on one GPU: `python benchmarks/lora_peers.py`.

Llama-1B of captured_models.py with random weights in bf16, rank-16 adapters of PEFT on all linear layers, 4 × 1024
tokens, bf16, fused AdamW, one NCCL rank. Engines are those of hugging_face_peers.py. Writes
benchmarks/results/lora_peers_h200.json; `--tiny` runs a small model on the CPU, to try this out.

    step_seconds   medians of blocks of steps, which alternate between the engines
    peak_bytes     what an engine had allocated at most, besides what those before it hold
"""

import argparse
import json
from pathlib import Path
from typing import Any

from captured_models import MODELS, machine
from hugging_face_peers import join_alone, measure

RESULTS = Path(__file__).parent / "results" / "lora_peers_h200.json"
_CAPTURED = ("default", "default ddp", "default lean", "default ddp lean", "default ddp lean compiled")
ENGINES = (*_CAPTURED, "fsdp", "ddp", "accelerate", "torch_ddp")
RANK, SAMPLES, TOKENS = 16, 4, 1024
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def build(*, device: str) -> tuple[Any, Any, Any]:
    """(model, tokens, a mask of ones)."""
    import peft
    import torch
    import transformers

    _, _, _, config = MODELS["llama-1b"]
    samples, tokens = (SAMPLES, TOKENS) if device == "cuda" else (2, 8)
    if device != "cuda":
        config = {**config, **_TINY, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.LlamaConfig(**config)
        base = transformers.LlamaForCausalLM._from_config(made, attn_implementation="sdpa").bfloat16()
        adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, adapters).train()
        ids = torch.randint(5, config["vocab_size"], (samples, tokens))
    return model, ids, torch.ones_like(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    import torch.distributed as dist

    device = "cpu" if asked.tiny else "cuda"
    join_alone(device=device)
    row = measure(lambda: build(device=device), engines=asked.engines, blocks=asked.blocks)
    dist.destroy_process_group()
    for engine, seconds in row["step_seconds"].items():
        print(f"{engine:26} {1e3 * seconds:8.2f} ms, peak {row['peak_bytes'][engine] / 2**30:6.2f} GiB")
    print(row["ratios"], row["failed"] or "", row["told"])
    out = asked.out or (None if asked.tiny else RESULTS)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "rows": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
