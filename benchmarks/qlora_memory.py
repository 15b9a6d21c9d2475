"""Memory of QLoRA, predicted and measured, on one GPU: `python benchmarks/qlora_memory.py`.

A Llama of random weights whose linear layers are NF4 with double quantisation (bitsandbytes), embeddings, norms and
head in bf16, rank-16 adapters of PEFT on all linear layers of the blocks; `fsdp`, bf16, fused AdamW. The 8B one runs on
one NCCL rank, the 70B one as a rehearsal of rank 0 of 4 without the others. Writes
benchmarks/results/qlora_memory_h200.json; `--tiny` tries small models out on the CPU, where nothing is measured.

    allocated_bytes, reserved_bytes   peaks of three steps, predicted and measured
"""

import copy
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from measuring import RESULTS, circumstances, free, join_alone, options, peaks, show, write
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.models.trace import Way, trace_model
from shardwise.planner.memory.peak import estimate

_COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "use_cache": False, "rms_norm_eps": 1e-5}
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
# Shape, ranks, samples, tokens, recompute.
CASES = (
    ("8B", 1, 4, 1024, "none"),
    ("8B", 1, 4, 1024, "full"),
    ("8B", 1, 1, 4096, "selective"),
    ("70B", 4, 1, 2048, "full"),
    ("70B", 4, 4, 2048, "full"),
)
STEPS = 3
KINDS = ("allocated", "reserved")


def quantised(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
    packed = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
    made.weight = packed
    # The device quantises it.
    return made.to(linear.weight.device)


def build(shape: dict[str, int], *, device: str) -> nn.Module:
    """All blocks have the values of the first: 140 GB of a 70B model in bf16 need not be made."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**_COMMON, **shape, "num_hidden_layers": 1})
    with torch.device(device):
        base = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    (block,) = base.model.layers
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, quantised(child))
    base.requires_grad_(False)
    base.model.layers.extend(copy.deepcopy(block) for _ in range(shape["num_hidden_layers"] - 1))
    config.num_hidden_layers = shape["num_hidden_layers"]
    base.is_loaded_in_4bit = True
    targets = [name for name, module in block.named_modules() if type(module).__name__ == "Linear4bit"]
    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=[name.rpartition(".")[2] for name in targets], task_type="CAUSAL_LM"
    )
    model: nn.Module = peft.get_peft_model(base, adapters).train()
    return model


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def measure(name: str, num_ranks: int, samples: int, tokens: int, recompute: str, *, device: str) -> dict[str, Any]:
    shape = SHAPES[name] if device == "cuda" else _TINY
    tokens = tokens if device == "cuda" else 16
    free()
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=samples, recompute=recompute, capture="off")
    with absent_group(num_ranks) if num_ranks > 1 else nullcontext():
        model = build(shape, device=device)
        began = time.perf_counter()
        spec = trace_model(
            model,
            loss=loss,
            make_batch=lambda size: torch.randint(5, _COMMON["vocab_size"], (size, tokens)),
            name=f"llama-{name}",
            ways=[Way(computes_in="bf16", recompute=way, device="cuda") for way in sorted({"none", recompute})],
        )
        traced = time.perf_counter() - began
        predicted = estimate(spec, plan=plan, num_ranks=num_ranks, batch=samples, optimizer="adamw-fused")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        shardwise.prepare(model, optimizer, plan, collectives=AbsentCollectives() if num_ranks > 1 else None)
        free()
        batch = torch.randint(5, _COMMON["vocab_size"], (samples, tokens), device=device)
        for _ in range(STEPS):
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        row = {
            "model": name,
            "num_ranks": num_ranks,
            "samples": samples,
            "tokens": tokens,
            "recompute": recompute,
            "trace_seconds": traced,
            "loss": value.item(),
            "at_rest_bytes": predicted.at_rest_bytes,
        }
        for kind in KINDS:
            key = f"{kind}_bytes"
            row[kind] = {"predicted_bytes": getattr(predicted, key), "measured_bytes": peaks()[key]}
    return row


def main() -> None:
    asked = options(__doc__, tiny=False, out=RESULTS / "qlora_memory_h200.json")
    device = "cpu" if asked.tiny else "cuda"
    # Rehearsals come first: each is a group of its own.
    rows = [measure(*case, device=device) for case in CASES if case[1] > 1]
    join_alone(device)
    rows = [measure(*case, device=device) for case in CASES if case[1] == 1] + rows
    dist.destroy_process_group()
    for row in rows:
        show(row["model"], row | {f"{kind}_{key}": size for kind in KINDS for key, size in row[kind].items()})
    write(None if asked.tiny else asked.out, {**circumstances(), "rows": rows})


if __name__ == "__main__":
    main()
