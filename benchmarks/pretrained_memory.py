"""Host memory of `from_pretrained` and `save_pretrained` on 2 CPU ranks: `python benchmarks/pretrained_memory.py`.

A Llama of random weights is saved by transformers. Each rank loads it under `fsdp`, and saves it again. Measured for
each: the peak of resident memory above what the process held before, and that less the rank's slices, which lie in host
memory only because the device is a CPU. When loading, it must be at most the largest tensor and a tenth of the model.
malloc gives memory back at once here, so that what is counted is in use. Writes
benchmarks/results/pretrained_memory.json.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import RESULTS, circumstances, resident_bytes, write
from workers import output_of, results_of, tell, torchrun

import shardwise
from shardwise import Plan
from shardwise.engine.prepared.inventory import held_bytes

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
VOCABULARY = 32000


def measured(action: Callable[[], Any]) -> tuple[Any, int]:
    """Return what it returns, and the peak while it ran, in bytes above what there was."""
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    result = action()
    return result, resident_bytes("VmHWM") - before


def make(folder: str, *, hidden: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=8, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def rank(folder: str) -> None:
    from transformers import LlamaForCausalLM

    dist.init_process_group("gloo")
    # Libraries that load at the first use.
    shardwise.prepare(torch.nn.Linear(2, 2), None, Plan())
    model, loading = measured(lambda: shardwise.from_pretrained(LlamaForCausalLM, folder, Plan(strategy="fsdp")))
    _, saving = measured(lambda: shardwise.save_pretrained(model, folder + "-again"))
    slices = sum(held_bytes(model).values())
    everyone: list[Any] = [None] * dist.get_world_size()
    found = {"load_peak_bytes": loading, "slices_bytes": slices, "load_extra_bytes": loading - slices}
    dist.all_gather_object(everyone, {**found, "save_extra_bytes": saving})
    if dist.get_rank() == 0:
        tell(everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--do", choices=("make", "rank"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.do == "make":
        return make(asked.folder, hidden=asked.hidden, layers=asked.layers)
    if asked.do == "rank":
        return rank(asked.folder)
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "model")
        size = ("--hidden", str(asked.hidden), "--layers", str(asked.layers))
        output_of(__file__, "--do", "make", "--folder", folder, *size)
        model_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        (ranks,) = results_of(output_of(*torchrun(2), __file__, "--do", "rank", "--folder", folder))
    largest = VOCABULARY * asked.hidden * 4
    sizes = {
        "model_bytes": model_bytes,
        "largest_tensor_bytes": largest,
        "extra_bytes": max(found["load_extra_bytes"] for found in ranks),
        "bound_bytes": largest + model_bytes // 10,
    }
    write(RESULTS / "pretrained_memory.json", {**circumstances(), **sizes, "ranks": ranks})
    print({name: f"{size / 1e6:.0f} MB" for name, size in sizes.items()}, ranks)
    sys.exit(0 if sizes["extra_bytes"] <= sizes["bound_bytes"] else 1)


if __name__ == "__main__":
    main()
